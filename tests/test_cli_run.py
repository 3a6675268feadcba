"""``lily run`` as a person or a script meets it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

LILY = [sys.executable, "-m", "lily"]
KEYS = {
    *("text", "reasoning", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("ttft_s", "prefill_tok_s", "decode_tok_s", "peak_memory_bytes", "model", "host", "policy"),
}


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([*LILY, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


def test_an_answer_goes_to_stdout_and_figures_to_stderr() -> None:
    done = run("run", "-p", "Tell me a story about a fox.", "--seed", "1", "--max-tokens", "400")
    assert done.returncode == 0
    assert "fox" in done.stdout
    assert "<" not in done.stdout
    assert "\033" not in done.stdout + done.stderr
    assert "bundled demo model" in done.stderr
    figures = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"\d+ prompt tokens at \d+ tok/s, \d+ output tokens at [\d.]+ tok/s(, cut at the limit)?; "
        r"first token after \d+ ms, peak memory \d+ MB",
        figures,
    )


def test_json_is_one_object_with_the_documented_keys() -> None:
    done = run("run", "--json", "-p", "What is 7 plus 6?", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert set(result) == KEYS
    assert "13" in result["text"]
    assert result["finish_reason"] == "stop"
    assert result["completion_tokens"] == len(result["token_ids"])
    assert (result["model"], result["host"], result["policy"]) == ("demo", "cpu", "cpu")
    assert result["peak_memory_bytes"] > 10_000_000
    assert result["cached_tokens"] == 0


def test_a_seed_gives_the_same_text_every_time() -> None:
    texts = {
        json.loads(run("run", "--json", "-p", "A story, please.", "--seed", "7", "--max-tokens", "40").stdout)[
            "reasoning"
        ]
        for _ in range(2)
    }
    assert len(texts) == 1


def test_the_prompt_can_come_from_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("What is 2 plus 3?")
    with file.open() as handle:
        done = run("run", "--temperature", "0", stdin=handle)
    assert done.returncode == 0
    assert "5" in done.stdout


def test_raw_continues_the_text_and_system_and_no_think_reach_the_template() -> None:
    raw = json.loads(
        run("run", "--json", "--raw", "-p", "Once upon a time", "--temperature", "0", "--max-tokens", "9").stdout
    )
    assert raw["prompt_tokens"] < 10
    quick = run("run", "--json", "--no-think", "--system", "Be brief.", "-p", "Hello", "--max-tokens", "5")
    assert json.loads(quick.stdout)["reasoning"] == ""


def test_stop_strings_and_limits() -> None:
    options = ["run", "--json", "--raw", "-p", "Once upon a time", "--temperature", "0", "--max-tokens", "30"]
    whole = json.loads(run(*options).stdout)["text"]
    stop = whole[8:14]
    cut = json.loads(run(*options, "--stop", stop).stdout)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "no-such-model", "-p", "x"], 2, "no model"),
        (["run", "-p", " "], 2, "the prompt is empty"),
        (["run", "-p", "x", "--temperature", "-1"], 2, "temperature is -1.0; it must be"),
        (["run", "-p", "x", "--top-p", "nan"], 2, "top_p is nan"),
        (["run", "-p", "x", "--max-tokens", "0"], 2, "--max-tokens"),
        (["run", "-p", "x", "--max-context", "10000000"], 2, "was made for 8192 tokens"),
        (["run", "-p", "word " * 60, "--max-context", "16"], 2, "tokens long but the context holds 16"),
        (["run", "-p", "x", "--policy", "m5mx"], 2, "m5max"),
        (["run", "-p", "x", "--host", "gpu"], 2, "no host called 'gpu'"),
        (["run", "-p", "x", "--raw", "--system", "s"], 2, "--system needs a chat template"),
        (["run", "qwen3.6-35b-a3b", "-p", "x"], 2, "configuration without weights"),
        (["run", "--nonsense"], 2, "--nonsense"),
    ],
)
def test_a_mistake_is_one_clear_line_and_no_traceback(arguments: list[str], code: int, message: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal may be there")
def test_a_metal_policy_without_metal_says_what_it_needs_and_what_there_is() -> None:
    done = run("run", "--policy", "m5max.yaml", "-p", "x")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("lily: ")]
    assert len(lines) == 1
    assert "needs an Apple silicon Mac" in lines[0]
    assert "this machine is Linux" in lines[0]


def test_ctrl_c_stops_an_answer() -> None:
    process = subprocess.Popen(
        [
            *LILY,
            "run",
            "--raw",
            "-p",
            "Once upon a time",
            "--temperature",
            "90",
            "--seed",
            "5",
        ],  # does not end by itself
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors


def _terminal(*keys: str) -> str:
    """What a person sees who types ``keys`` into a chat, each after the answer to the one before."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "HOME": "/nonexistent"}
    process = subprocess.Popen(
        [*LILY, "run", "--temperature", "0"], stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    seen = ""

    def read_until(text: str, count: int) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while seen.count(text) < count and time.monotonic() < end:
            if select.select([parent], [], [], 0.2)[0]:
                data = os.read(parent, 65536)
                if b"\033[6n" in data:
                    os.write(parent, b"\033[1;1R")  # the terminal's answer to where the cursor is
                seen += data.decode(errors="replace")

    read_until("›", 1)
    answers = 0
    for key in keys:
        os.write(parent, key.encode())
        if key.endswith("\r") and not key.startswith("/"):
            answers += 1
            read_until("peak memory", answers)
            time.sleep(0.2)
    process.wait(timeout=30)
    os.close(parent)
    return seen


def test_a_chat_on_a_terminal_reuses_the_session() -> None:
    seen = _terminal("What is 2 plus 3?\r", "What is 4 plus 4?\r", "/quit\r")
    assert "5" in seen
    assert "8" in seen
    assert re.search(r"\(\d+ cached\)", seen)
    assert "\033[2m" in seen  # thoughts are dimmed
