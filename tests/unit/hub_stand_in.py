"""A stand-in for the Hugging Face hub on the loopback: dataset repositories with synthetic rows, over HTTP.

Only what `datasets` asks for while it loads a repository of Parquet files. Rows have the schema of the real datasets.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def _choices(key: str, counts: tuple[int, int]) -> Callable[[int], Row]:
    """Questions with so many choices, the first one and the others."""

    def row(index: int) -> Row:
        letters = "ABCDE"[: counts[index > 0]]
        options = {"text": [f"item {letter} {index}" for letter in letters], "label": list(letters)}
        return {"id": f"q{index}", key: f"which item fits {index}", "choices": options, "answerKey": "B"}

    return row


def _race(index: int) -> Row:
    won = {"question": f"who won {index}?", "answer": "ABCD"[index % 4], "options": ["he", "she", "it", "they"]}
    have = {"question": "I have  _  .", "answer": "B", "options": ["a cat", "a dog", "a cow", "an ox"]}
    return {"article": f"a short text {index}", "problems": repr([have, won])}


def _hellaswag(index: int) -> Row:
    texts = {"activity_label": "Cooking", "ctx_a": f"a man [title] stirs pot {index}.", "ctx_b": "then he", "ctx": ""}
    kinds = {"source_id": "s", "split": "val", "split_type": "indomain", "label": str(index % 4)}
    return {"ind": index, **texts, "endings": ["eats.", "sleeps [step] now.", "runs.", "sings."], **kinds}


def _mathqa(index: int) -> Row:
    options = "a ) 24 , b ) 120 , c ) 625 , d ) 720 , e ) 1024"
    facts = {"Rationale": "r", "annotated_formula": "f", "linear_formula": "l", "category": "general"}
    return {"Problem": f"what is {index} + 1", "options": options, "correct": "abcde"[index % 5], **facts}


def _piqa(index: int) -> Row:
    return {"goal": f"open jar {index}", "sol1": "turn the lid", "sol2": "hit it", "label": index % 2}


def _winogrande(index: int) -> Row:
    sentence = f"the cup {index} did not fit the box because the _ was too big."
    return {"sentence": sentence, "option1": "cup", "option2": "box", "answer": str(1 + index % 2)}


def _boolq(index: int) -> Row:
    return {"question": f"is {index} even", "passage": "numbers are odd or even", "idx": index, "label": index % 2}


def _copa(index: int) -> Row:
    texts = {"premise": "The man fell.", "choice1": "It was icy.", "choice2": "He slept."}
    return {**texts, "question": ("cause", "effect")[index % 2], "idx": index, "label": index % 2}


def _page(index: int) -> Row:
    return {"page": f" = Page {index} = \n\n It 's a page , with 1 @,@ 000 words . \n"}


TWO, THREE = ("train", "validation"), ("train", "validation", "test")
# (dataset, config, splits, rows of a split, a row), for the twelve tasks.
SOURCES: list[tuple[str, str, tuple[str, ...], int, Callable[[int], Row]]] = [
    ("EleutherAI/lambada_openai", "default", ("test",), 5, lambda i: {"text": f"she said to him {i} go home"}),
    ("Rowan/hellaswag", "default", TWO, 6, _hellaswag),
    ("baber/piqa", "default", TWO, 7, _piqa),
    ("regisss/math_qa", "default", THREE, 5, _mathqa),
    ("allenai/winogrande", "winogrande_xl", TWO, 6, _winogrande),
    ("EleutherAI/race", "high", ("test",), 4, _race),
    ("allenai/ai2_arc", "ARC-Easy", THREE, 4, _choices("question", (3, 4))),
    ("allenai/ai2_arc", "ARC-Challenge", THREE, 5, _choices("question", (5, 4))),
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", THREE, 3, _page),
    ("aps/super_glue", "boolq", TWO, 6, _boolq),
    ("aps/super_glue", "copa", TWO, 4, _copa),
    ("allenai/openbookqa", "main", THREE, 5, _choices("question_stem", (4, 4))),
]
REPOSITORIES: dict[str, dict[str, dict[str, list[Row]]]] = {}  # dataset -> config -> split -> rows
for _dataset, _config, _splits, _count, _row in SOURCES:
    _rows = {split: [_row(index) for index in range(_count)] for split in _splits}
    REPOSITORIES.setdefault(_dataset, {})[_config] = _rows


COMMIT = "0123456789" * 4  # of every repository


def _parquet(rows: list[Row]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def _files(configs: dict[str, dict[str, list[Row]]]) -> dict[str, bytes]:
    """README with the configs, and one Parquet file per config and split."""
    found, lines = {}, ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = f"{config}/{split}-00000-of-00001.parquet"
            found[path] = _parquet(rows)
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    found["README.md"] = "\n".join([*lines, "---", ""]).encode()
    return found


def _entries(files: dict[str, bytes], below: str, recursive: bool) -> list[Row]:
    """Files and folders below a folder, as the hub lists them."""
    entries: dict[str, Row] = {}
    for path, content in files.items():
        if below and not path.startswith(below + "/"):
            continue
        rest = path[len(below) + 1 :] if below else path
        if "/" in rest:
            folder = path[: len(path) - len(rest)] + rest.partition("/")[0]
            entries[folder] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
        if "/" not in rest or recursive:
            oid = hashlib.sha1(content).hexdigest()
            entries[path] = {"type": "file", "oid": oid, "size": len(content), "path": path}
    return list(entries.values())


class Handler(BaseHTTPRequestHandler):
    """Answers of the hub."""

    protocol_version = "HTTP/1.1"
    files = {name: _files(configs) for name, configs in REPOSITORIES.items()}

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        """Paths are [/api]/datasets/<name>/ and resolve/<commit>/<path>, tree/<commit>/<path> or revision/<commit>."""
        url = urlsplit(unquote(self.path))
        for name, files in self.files.items():
            kind, _, rest = url.path.partition(f"datasets/{name}/")
            if not rest or kind not in ("/", "/api/"):
                continue
            action, _, path = (*rest.split("/", 2), "")[:3]
            if action == "resolve" and path in files:
                etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
                self.answer(200, files[path], ETag=etag, X_Repo_Commit=COMMIT)
            elif action == "tree" and (rows := _entries(files, path, "recursive=true" in url.query.lower())):
                self.answer_json(rows)
            elif action == "revision":
                siblings = [{"rfilename": path} for path in files]
                self.answer_json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False})
            else:
                self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            return
        self.answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@contextmanager
def serve() -> Iterator[dict[str, str]]:
    """Environment by which programs find a hub on the loopback, and no other, until the block ends."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # As a proxy it also answers for the hub's other hosts, whose names are derived from the first.
        environment = {"HF_ENDPOINT": "http://hub.invalid", "HF_HUB_DISABLE_XET": "1"}
        for name in ("http_proxy", "https_proxy"):
            environment |= dict.fromkeys((name, name.upper()), f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield environment
        finally:
            server.shutdown()
