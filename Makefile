# `make` lists what there is. Everything runs in .venv, which is made from requirements.lock when needed.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# Bytecode is kept whatever the caller's shell says: without it each of hundreds of processes compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

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
PIPELINE = $(PY) -m workflows.program --die-with-parent --scale $(SCALE) --cores $(CORES) --results $(RESULTS)

# A misspelt target is refused before anything is made, with the names that are nearest.
GOALS := $(shell sed -n 's/^\.PHONY: //p' $(firstword $(MAKEFILE_LIST)))
NEAREST = import difflib, sys; print(" or ".join(difflib.get_close_matches(sys.argv[1], sys.argv[2:])))
near = $(shell python3 -c '$(NEAREST)' '$1' $(GOALS))
meant = $(if $(wildcard experiments/studies/$1.yaml),it is a study: .venv/bin/snakemake -c2 $1,$\
  $(if $(near),did you mean $(near)?,`make` lists all))
$(foreach goal,$(filter-out $(GOALS) $(VENV)/.complete,$(MAKECMDGOALS)),$(error unknown target $(goal); $(call meant,$(goal))))

.PHONY: help
help: ## list the targets and settings
	@printf 'Usage: make TARGET [SCALE=%s] [CORES=%s] [RESULTS=%s]\n\n' '$(SCALE)' '$(CORES)' '$(RESULTS)'
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

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

.PHONY: report-kept
report-kept: venv ## write the HTML report of what is kept of SCALE, without training: build/report-SCALE.html
	@$(PY) -m experiments.pages.report --scale '$(SCALE)' --results results/reference --out 'build/report-$(SCALE).html'

.PHONY: regression
regression: venv ## compare a ci run with results/reference/ci
	@$(PIPELINE) ci_regression $(ARGS)

.PHONY: reference
reference: venv ## write results/reference/SCALE from the results of SCALE
	@$(PIPELINE) all
	@$(KEEP)
	@$(KEEP) --study window_ablation
	@$(KEEP) --study strategies
	@install -D -m 644 '$(RESULTS)/$(SCALE)/figures/methods.png' results/reference/$(SCALE)/figures/methods.png

.PHONY: keep
keep: venv ## write STUDY, its figures and its runs to results/reference/SCALE (ARGS=--keep-runs: those of older code, too)
	@$(PIPELINE) '$(STUDY)' $(ARGS)
	@$(KEEP) --study '$(STUDY)'

.PHONY: keep-claims
keep-claims: venv ## judge the claims by what is kept in results/reference/SCALE, and write that beside it
	@$(PY) -m experiments.verdicts.claims --scale $(SCALE) --results results/reference --print

.PHONY: save
save: venv ## keep the runs of STUDY that have ended, and what they show (ARGS=--replace: in place of others)
	@$(KEEP) --study '$(STUDY)' --so-far $(ARGS)

# The text first: runs that came after it are taken to be made of it.
.PHONY: restore
restore: venv ## put the runs of STUDY that are kept back into results, where the workflow goes on with the others
	@$(PIPELINE) texts
	@$(PY) -m experiments.verdicts.archive --scale $(SCALE) --results $(RESULTS) --study '$(STUDY)'

.PHONY: replay
replay: venv ## compute what is in results/reference/SCALE again from its runs and compare (ARGS=--write: redraw)
	@$(PY) -m experiments.verdicts.replay --scale $(SCALE) $(ARGS)

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
	@folder=$$($(BENCH) steps --results '$(RESULTS)/bench' $(ARGS)); \
	[ -z "$$folder" ] || $(PY) -m paper_figures bench_steps --results "$$folder"

.PHONY: bench-race
bench-race: venv ## train over limited links until a validation loss is reached, by the clock (root only, two hours)
	@folder=$$($(BENCH) race --results '$(RESULTS)/bench' $(ARGS)); \
	[ -z "$$folder" ] || $(PY) -m paper_figures bench_race --results "$$folder"

.PHONY: bench-keep
bench-keep: venv ## copy the results of the benchmarks to results/reference/bench, to be committed
	@$(BENCH) keep --results '$(RESULTS)/bench' $(ARGS)

.PHONY: bytes
bytes: venv ## count what every method sends (docs/library/bytes.md) and what a step launches (docs/gpu.md)
	@$(PY) -m experiments.simulation.bytes_sent --out results/reference/rehearsal/bytes_sent.csv
	@$(PY) -m experiments.bench.launches --out results/reference/rehearsal/launches.csv
	@$(PY) -m paper_figures bytes_sent --results results/reference/rehearsal --out build/bytes
	@install -D -m 644 build/bytes/bytes_sent.png results/reference/rehearsal/figures/bytes_sent.png

# What each part of `make gpu` may take in seconds, and what the Python then runs; the most useful first. Together they
# have GPU_SECONDS: the first four fit, and the last one has what they leave.
GPU_PARTS = step tests engine rehearsal stage
PARTS ?= $(GPU_PARTS)
GPU_SECONDS = $(if $(FULL),8700,720)
ON_GPU = --device cuda --results '$(RESULTS)/bench'
BRIEF = $(if $(FULL),,--quick)
GPU_step = $(if $(FULL),2880,180) -m experiments.bench step $(BRIEF) $(ON_GPU)
GPU_tests = $(if $(FULL),600,130) -m pytest tests/gpu -m gpu -v -p no:cacheprovider -n 6 --dist loadgroup
GPU_engine = $(if $(FULL),1440,80) -m experiments.bench engine --model gpt2-124m $(BRIEF) $(ON_GPU)
GPU_rehearsal = $(if $(FULL),1860,330) -m experiments.bench rehearsal --seconds $(if $(FULL),1800,300) $(ON_GPU)
GPU_stage = $(if $(FULL),1920,240) -m experiments.bench engine --model gpt2-2.5b-stage $(BRIEF) $(ON_GPU)
# What the parts import, added to a PYTHON of the user's where it is missing.
GPU_NEEDS = megatron-core>=0.16.1 psutil numpy pandas>=2 pydantic>=2 PyYAML rich typer scipy tokenizers pytest>=9 pytest-xdist

# Where torch in .venv sees no GPU, .venv-gpu lies over it: a CUDA build of the same version, the rest from .venv. Builds
# for CUDA 13 are PyPI's, those for 12.6 run on every driver for CUDA 12. How pip finds the other build is left out.
.PHONY: gpu
gpu: ## profile, test, time and rehearse on an NVIDIA GPU, 12 minutes (PYTHON; PARTS; FULL=1); docs/gpu.md
	@end() { echo "error: $$1; $$2" >&2; exit 2; }; \
	sees() { "$$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; }; \
	[ -z '$(ARGS)' ] || end 'make gpu takes no ARGS' 'use PARTS="tests step" or FULL=1'; \
	unknown='$(filter-out $(GPU_PARTS),$(PARTS))'; \
	[ -z "$$unknown" ] || end "unknown part $$unknown" 'use some of PARTS="$(GPU_PARTS)"'; \
	found=$$(nvidia-smi 2> /dev/null) || end 'nvidia-smi finds no GPU' '`make test` runs tests/gpu on the CPU'; \
	$(if $(PYTHON),,$(MAKE) --no-print-directory venv;) \
	python='$(or $(PYTHON),$(PY))'; over='$(abspath $(VENV))-gpu'; \
	if [ -n '$(PYTHON)' ]; then \
	  sees "$$python" || end "no torch in $$python that sees this GPU" 'name another PYTHON, or none'; \
	  version=$$("$$python" -c 'import torch; print(torch.__version__.partition("+")[0])'); \
	  packages=("torch==$$version" $(GPU_NEEDS:%='%')); \
	elif sees "$$python"; then over=; \
	elif sees "$$over/bin/python"; then python="$$over/bin/python"; over=; \
	else \
	  index=https://pypi.org/simple; \
	  case "$$found" in *'CUDA Version: 12.'*) index=https://download.pytorch.org/whl/cu126 ;; esac; \
	  packages=(--index-url "$${EDGC_GPU_INDEX:-$$index}" "$$(grep '^torch==' requirements.lock)"); \
	  export PIP_CONFIG_FILE=/dev/null; unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX; \
	fi; \
	if [ -n "$$over" ]; then \
	  echo "== a Python environment in $$over"; rm -rf -- "$$over"; "$$python" -m venv "$$over"; \
	  "$$python" -c 'import sys; [print(f"import site; site.addsitedir({p!r})") \
	    for p in sys.path if p.endswith("-packages")]' > "$$(echo "$$over"/lib/python3*/site-packages)/below.pth"; \
	  python="$$over/bin/python"; \
	  timeout 600 "$$python" -m pip install --quiet --disable-pip-version-check "$${packages[@]}" && sees "$$python" || \
	    end "no torch for this GPU in $$over" 'EDGC_GPU_INDEX names another package index; see docs/gpu.md'; \
	fi; \
	mkdir -p '$(RESULTS)/gpu'; failed=; trap 'kill $$! 2> /dev/null; exit 130' INT TERM; \
	SECONDS=0; \
	part() { \
	  left=$$(($(GPU_SECONDS) - SECONDS)); limit=$$((left < $$2 ? left : $$2)); \
	  if ((3 * limit < $$2)); then echo "== $$1 is left out: $$left s are left; use PARTS=$$1"; return; fi; \
	  log='$(RESULTS)/gpu/'$$1.log; echo "== $$1, at most $$limit s ($$log)"; code=0; \
	  env -u TORCH_ALLOW_TF32_CUBLAS_OVERRIDE timeout -k 10 "$$limit" "$$python" "$${@:3}" > "$$log" 2>&1 & \
	  wait $$! || code=$$?; \
	  case $$code in 0) ;; 124 | 137) failed+=" $$1 (out of time)" ;; *) failed+=" $$1 (exit code $$code)" ;; esac; \
	  tail -n 1 "$$log"; \
	}; \
	$(foreach part,$(PARTS),part $(part) $(GPU_$(part));) \
	echo "logs: $(RESULTS)/gpu; results: $(RESULTS)/bench"; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# The tests of a file stay together, for they share what takes long to make; tests/conftest.py says which start first.
# One file more than cores: some of them wait, for injected delays or for what they have killed.
.PHONY: test
test: venv ## run all tests, CORES files and one at a time (ARGS: options of pytest; -n0 runs one after another)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n $$(($(CORES) + 1)) --dist loadfile --no-loadscope-reorder $(ARGS)

# Not part of `test`, which has a hundredth of it.
.PHONY: soak
soak: venv ## train every method and strategy at random and kill runs, for 20 minutes (ARGS: options of tests.soak)
	@OMP_NUM_THREADS=1 $(PY) -m tests.soak --results '$(RESULTS)' $(ARGS)

.PHONY: soak-keep
soak-keep: ## copy what the soak of each machine did to results/reference/soak, to be committed
	@install -D -m 644 -t results/reference/soak '$(RESULTS)'/soak/*.json

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

# Not part of `test`, for every example imports its framework in each of two processes, several times.
.PHONY: test-frameworks
test-frameworks: venv ## train under Trainer, Accelerate, Lightning and torchtitan, in environments of their own
	@OMP_NUM_THREADS=1 $(PY) -m pytest tests/integration/test_trainers.py -m frameworks -n 2 $(ARGS)

.PHONY: lint
lint: venv ## ruff, mypy and snakefmt
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache --no-logo | tail -n +9
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

.PHONY: pages
pages: venv ## render README.md and docs from docs/templates and the tables of results/reference
	@$(PY) -m experiments.pages.render

.PHONY: docs
docs: venv ## build the site of the documentation, with the report, into build/site; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir build/site $(ARGS) && echo build/site/index.html

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
	PYTHONUNBUFFERED=1 '$(PY)' -m pip install --disable-pip-version-check --progress-bar off --no-compile -r requirements.lock | \
	while IFS= read -r line; do case "$$line" in \
	  Collecting*) done=$$((done + 1)); [ $$((done % 25)) != 0 ] || echo "      $$done of $$count found, to $${line#* }" ;; \
	  'Installing collected'*) echo '      all downloaded, unpacking' ;; \
	esac; done; \
	echo '[3/4] this project'; \
	'$(PY)' -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	echo '[4/4] checking that the packages fit each other'; \
	'$(PY)' -m pip check; \
	touch '$@'
