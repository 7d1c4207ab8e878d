# `make` lists what there is. Everything runs in .venv, which is made from requirements.lock when needed.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

SCALE ?= ci
STUDY ?= methods
# More than four cores bring nothing at ci scale: a run is four processes, and two runs at once would disturb
# each other's timings.
CORES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
RESULTS ?= results
VENV ?= .venv
ARGS ?=
TORCH ?=

PY := $(VENV)/bin/python
# snakefmt calls shfmt, which lies beside it.
SNAKEFMT = PATH='$(abspath $(VENV))/bin':"$$PATH" snakefmt
BENCH = $(PY) -m experiments.bench
KEEP = $(PY) -m experiments.verdicts.reference --scale $(SCALE) --results $(RESULTS) --reference results/reference/$(SCALE)
# What steps took is kept: rule, study, name, threads, seconds; also a whole reproduction, and all tests.
DURATIONS = results/reference/$(SCALE)/durations.csv
HOW_LONG = $$1 == "all" { print "\n`make reproduce SCALE=$(SCALE)` took " int($$5 / 60 + 0.5) " min on " $$4 " cores." } \
  $$1 == "tests" { print "`make test` took " int($$5 / 60 + 0.5) " min on " $$4 " cores." }
PIPELINE = $(PY) -m workflows.program --die-with-parent --scale $(SCALE) --cores $(CORES) --results $(RESULTS)

# A misspelt target is refused before anything is made, with the names that are nearest.
GOALS := $(shell sed -n 's/^\.PHONY: //p' $(firstword $(MAKEFILE_LIST)))
$(foreach goal,$(filter-out $(GOALS) $(VENV)/.complete,$(MAKECMDGOALS)), \
  $(error $(or $(shell python3 workflows/nearest.py '$(goal)' $(GOALS)),unknown target $(goal))))

.PHONY: help
help: ## list the targets and settings
	@printf 'Usage: make TARGET [SCALE=%s] [CORES=%s] [RESULTS=%s]\n\n' '$(SCALE)' '$(CORES)' '$(RESULTS)'
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@[ ! -f '$(DURATIONS)' ] || awk -F , '$(HOW_LONG)' '$(DURATIONS)'

.PHONY: reproduce
reproduce: venv ## run the main studies, then figures, claims and report; a second call does only what is missing
	@$(PIPELINE) all $(ARGS)

.PHONY: slurm
slurm: venv ## the same on a Slurm cluster (workflows/profiles/slurm/site.yaml); continues after a kill
	@$(PIPELINE) all --profile slurm $(ARGS)

.PHONY: figures
figures: venv ## draw all figures (trains what they need)
	@$(PIPELINE) figures $(ARGS)

.PHONY: report
report: venv ## write the HTML report (makes what it shows)
	@$(PIPELINE) report $(ARGS)

.PHONY: regression
regression: venv ## compare a ci run with results/reference/ci
	@$(PIPELINE) ci_regression $(ARGS)

.PHONY: reference
reference: venv ## write results/reference/SCALE from the results of SCALE
	@$(PIPELINE) all
	@$(KEEP)
	@$(KEEP) --study window_ablation --runs
	@install -D -m 644 '$(RESULTS)/$(SCALE)/durations.csv' '$(DURATIONS)'
	@install -D -m 644 '$(RESULTS)/$(SCALE)/figures/methods.png' results/reference/$(SCALE)/figures/methods.png

.PHONY: keep
keep: venv ## write STUDY, its figures and its runs to results/reference/SCALE, to be committed
	@$(PIPELINE) '$(STUDY)' $(ARGS)
	@$(KEEP) --study '$(STUDY)' --runs

.PHONY: keep-claims
keep-claims: venv ## judge the claims by what is kept in results/reference/SCALE, and write that beside it
	@$(PY) -m experiments.verdicts.claims --scale $(SCALE) --results results/reference --print

.PHONY: save
save: venv ## keep the runs of STUDY that have ended, and what they show (ARGS=--replace: for those of an earlier time)
	@$(KEEP) --study '$(STUDY)' --so-far $(ARGS)

# The text first: runs have to be younger, or they would be made again.
.PHONY: restore
restore: venv ## put the runs of STUDY that are kept back into results, where the workflow goes on with the others
	@$(PIPELINE) texts
	@$(PY) -m experiments.verdicts.archive restore --scale $(SCALE) --results $(RESULTS) --study '$(STUDY)'

# Not part of `reproduce`: 87 runs, more than an hour at ci scale; 12 runs; 21 runs.
.PHONY: equal-bytes
equal-bytes: ## compare all compressors at equal bytes and write that to results/reference/SCALE
	@$(MAKE) keep STUDY=equal_bytes

.PHONY: optimus-cc
optimus-cc: ## compare Optimus-CC and its parts and write that to results/reference/SCALE
	@$(MAKE) keep STUDY=optimus_cc

.PHONY: moe
moe: ## train a small mixture of experts, compressed or not, and write that to results/reference/SCALE
	@$(MAKE) keep STUDY=moe

.PHONY: replay
replay: venv ## compute what is in results/reference/SCALE again from its runs and compare (ARGS=--write: redraw)
	@$(PY) -m experiments.verdicts.archive replay --scale $(SCALE) $(ARGS)

.PHONY: dry-run
dry-run: venv ## print memory and bytes of every rank of STUDY (a paper-scale one), no GPU needed (ARGS: its options)
	@$(PY) -m experiments.simulation.dry_run --study '$(STUDY)' $(ARGS)

# SCALE=paper: below it no task needs a download.
.PHONY: prefetch
prefetch: venv ## download the data of the standard zero-shot tasks of SCALE, on a machine with network
	@$(PY) -m experiments.evaluation.standard_tasks prefetch --scale '$(SCALE)' $(ARGS)

.PHONY: bench
bench: venv ## time the compression engine on this machine, on its GPU if it has one (ARGS: options of the program)
	@folder=$$($(BENCH) engine --results '$(RESULTS)/bench' $(ARGS)); \
	$(PY) -m paper_figures bench --results "$$folder"

.PHONY: bench-network
bench-network: venv ## time training steps over links of limited bandwidth (root only)
	@folder=$$($(BENCH) network --results '$(RESULTS)/bench' $(ARGS)); \
	[ -z "$$folder" ] || $(PY) -m paper_figures bench_network --results "$$folder"

.PHONY: bench-steps
bench-steps: venv ## compare predicted with measured training steps over links of limited bandwidth (root only)
	@folder=$$($(BENCH) steps --results '$(RESULTS)/bench' $(ARGS)); [ -n "$$folder" ] || exit 0; \
	$(BENCH) pipeline --results '$(RESULTS)/bench' >/dev/null; \
	$(PY) -m paper_figures bench_steps --results "$$folder"

.PHONY: bench-race
bench-race: venv ## train over limited links until a validation loss is reached, by the clock (root only, two hours)
	@folder=$$($(BENCH) race --results '$(RESULTS)/bench' $(ARGS)); \
	[ -z "$$folder" ] || $(PY) -m paper_figures bench_race --results "$$folder"

.PHONY: bench-stages
bench-stages: venv ## see when pipeline stages finish with and without DAC, over links with injected delays
	@folder=$$($(BENCH) stages --results '$(RESULTS)/bench' $(ARGS)); \
	$(PY) -m paper_figures stage_spread --results "$$folder"; \
	$(PY) -m paper_figures timeline --results "$$folder"

.PHONY: bench-keep
bench-keep: venv ## copy the results of the benchmarks to results/reference/bench, to be committed
	@$(BENCH) keep --results '$(RESULTS)/bench' $(ARGS)

# The Python that runs it needs nothing but itself: it makes .venv, and .venv-gpu where torch in .venv sees no GPU.
.PHONY: gpu
gpu: ## test, time and profile on an NVIDIA GPU, 25 minutes (PYTHON: one with a torch for it; ARGS); docs/gpu.md
	@for python in $(if $(PYTHON),'$(PYTHON)') python3.11 python3 none; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && break; \
	done; \
	if [ "$$python" = none ]; then \
	  echo "error: no Python 3.11 found (tried python3.11 and python3); install it or give PYTHON=" >&2; exit 2; \
	fi; \
	"$$python" -m experiments.bench.gpu_kit --make '$(MAKE)' --venv '$(VENV)' --results '$(RESULTS)' \
	  $(if $(PYTHON),--python '$(PYTHON)') $(ARGS)

# The tests of a file stay together, for they share what takes long to make; tests/conftest.py says which start first.
# One file more than cores: some of them wait, for injected delays or for what they have killed.
.PHONY: test
test: venv ## run all tests, CORES files and one at a time (ARGS: options of pytest; -n0 runs one after another)
	@began=$$SECONDS; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $$(($(CORES) + 1)) --dist loadfile --no-loadscope-reorder $(ARGS); \
	$(if $(ARGS),true,$(PY) -m workflows.durations $$((SECONDS - began)) \
	  --cores $(CORES) --scale $(SCALE) --results '$(RESULTS)')

# Not part of `test`: it fetches another torch.
.PHONY: test-torch
test-torch: venv ## run the library's tests with another torch, TORCH=2.6.0, in an environment that is thrown away
	@test -n '$(TORCH)' || { echo "error: TORCH is not set, fix: make test-torch TORCH=2.6.0" >&2; exit 2; }
	@$(PY) -m tests.other_torch '$(TORCH)' $(ARGS)

.PHONY: test-network
test-network: venv ## test the network of limited bandwidth (root only; says why where it skips)
	@$(PY) -m pytest tests/integration/test_testbed.py -m root $(ARGS)

# Not part of `test`, for minutes pass in queues.
.PHONY: test-slurm
test-slurm: venv ## run the workflow and faults on a real Slurm of two emulated nodes (root only; says why it skips)
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/slurm -m slurm $(ARGS)

.PHONY: lint
lint: venv ## ruff, mypy and snakefmt
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(SNAKEFMT) --check Snakefile workflows/rules

.PHONY: format
format: venv ## rewrite the sources in the project's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(SNAKEFMT) Snakefile workflows/rules

.PHONY: clean-results
clean-results: ## delete the generated results of SCALE (never results/reference)
	@test -f 'experiments/scales/$(SCALE).yaml' || { echo "error: unknown scale '$(SCALE)'" >&2; exit 2; }
	@rm -rf -- '$(RESULTS)/$(SCALE)' && echo 'deleted $(RESULTS)/$(SCALE)'

.PHONY: numbers
numbers: venv ## write the numbers and tables of README and docs from results/reference
	@$(PY) -m experiments.pages.columns
	@$(PY) -m experiments.pages.side_by_side write
	@$(PY) -m experiments.pages.numbers fill $(ARGS)

.PHONY: docs
docs: venv ## build the site of the documentation into build/site; a link that leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir build/site $(ARGS) && echo build/site/index.html

.PHONY: environment
environment: venv ## rewrite environment.yml and workflows/envs from requirements.lock
	@$(PY) -m workflows.environments

.PHONY: venv
venv: $(VENV)/.complete ## make .venv from requirements.lock

# The stamp is written last, so an installation that was interrupted is done again from the start. Two calls at once
# wait for each other.
$(VENV)/.complete: requirements.lock
	@exec 9> '$(VENV).lock'; ! command -v flock > /dev/null || flock 9; \
	if [ -e '$@' ] && [ '$@' -nt requirements.lock ]; then exit 0; fi; \
	for python in python3.11 python3 none; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null && break; \
	done; \
	if [ "$$python" = none ]; then \
	  echo "error: no Python 3.11 found (tried python3.11 and python3); install it or put it on the PATH" >&2; exit 2; \
	fi; \
	count=$$(grep -c '==' requirements.lock); \
	echo "[1/4] a new Python environment in $(VENV)"; \
	rm -rf -- '$(VENV)'; \
	"$$python" -m venv '$(VENV)'; \
	echo "[2/4] $$count packages of requirements.lock, 2 GB: some minutes, most of them for downloads"; \
	done=0; \
	PYTHONUNBUFFERED=1 '$(PY)' -m pip install --disable-pip-version-check --progress-bar off -r requirements.lock | \
	while IFS= read -r line; do case "$$line" in \
	  Collecting*) done=$$((done + 1)); [ $$((done % 25)) != 0 ] || echo "      $$done of $$count found, to $${line#* }" ;; \
	  'Installing collected'*) echo '      all downloaded, unpacking' ;; \
	esac; done; \
	echo '[3/4] this project'; \
	'$(PY)' -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	echo '[4/4] checking that the packages fit each other'; \
	'$(PY)' -m pip check; \
	touch '$@'
