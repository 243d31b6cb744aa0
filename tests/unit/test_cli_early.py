"""What a server's front end imports, and what it must not: each in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torpor.engine.tokenizer import Tokenizer
from torpor.testing.tokenizers import byte_tokenizer

CHAT = [{"role": "user", "content": "Grüße, 你好!"}]


def run(code: str, *arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code, *arguments], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_parsing_serve_needs_neither_torch_nor_a_web_framework() -> None:
    loaded = run("import sys, json, torpor.cli.serve; print(json.dumps(list(sys.modules)))")
    assert not {"torch", "transformers", "fastapi"} & set(loaded)


def test_serve_refuses_wrong_values_without_torch() -> None:
    """Importing it takes longer than anybody wants to wait to read of a typing error."""
    code = """if True:
        import json, sys
        from torpor.cli import main
        wrong = [["--dtype", "int8"], ["--kv-connector", "nixl", "--kv-option", "nope=1"], []]
        for argv in wrong:
            try:
                sys.stderr = open("/dev/null", "w")
                main(["serve", "/no/such/model", *argv])
            except SystemExit as ended:
                assert ended.code == 2
        sys.stderr = sys.__stderr__
        print(json.dumps(list(sys.modules)))"""
    assert not {"torch", "transformers", "uvicorn"} & set(run(code))


def test_the_front_end_tokenizes_without_torch(tmp_path: Path) -> None:
    """The same tokens as with torch; and torch, the module, is there again for whoever wants it."""
    byte_tokenizer().save_pretrained(tmp_path)
    code = """if True:
        import json, sys, threading
        from torpor.cli.early import import_early
        import_early(without_torch=True)
        [thread] = [t for t in threading.enumerate() if t.name == "torpor-imports"]
        thread.join()
        from torpor.engine.tokenizer import Tokenizer
        tokenizer = Tokenizer.load(sys.argv[1])
        ids = tokenizer.encode_chat(json.loads(sys.argv[2]))
        found = [ids, tokenizer.decode(ids), "torch" in sys.modules, "fastapi" in sys.modules]
        import torch
        print(json.dumps(found))
    """
    ids, text, has_torch, has_server = run(code, str(tmp_path), json.dumps(CHAT))
    assert (has_torch, has_server) == (False, True)
    tokenizer = Tokenizer.load(tmp_path)
    assert ids == tokenizer.encode_chat(CHAT)
    assert text == tokenizer.decode(ids)


def test_torch_is_not_hidden_from_who_has_it() -> None:
    code = """if True:
        import json, sys
        import torch
        from torpor.cli.early import torch_hidden
        with torch_hidden(True):
            import torch as again
        print(json.dumps(again is torch))
    """
    assert run(code) is True
