"""Coding agents from npm. Each is asked to copy a word: it reads one file, writes another and answers, as the script
of its model says. The second reply is for prompts that hold the word: the agent's tool has brought it there."""

import json
import re
import subprocess

import pytest
from conftest import LOOPBACK_ONLY, NODE_PATH, call, npm

TASK = "Copy the word in secret.txt."
WORD = "quokka"
ANSWER = "The word was quokka."


# Each agent: its settings are written to its home; its command, and variables that it needs.


def codex(url, home, model="lily"):
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "lily"\n'
        f'[model_providers.lily]\nname = "Lily"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    # Its sandbox needs rights that containers don't give; the folder is temporary.
    return [npm("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK], {}


def codex_with_patches(url, home):
    """For a model that it knows it has a tool with a grammar."""
    return codex(url, home, "gpt-5.5")


def codex_with_code(url, home):
    """For the latest it has one tool that runs code, which calls the others; it is in an item of the input."""
    return codex(url, home, "gpt-6.2-sol")


def qwen(url, home):
    variables = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": url + "/v1", "OPENAI_MODEL": "lily"}
    return [npm("qwen"), "--auth-type", "openai", "--yolo", TASK], variables


def qwen_with_messages(url, home):
    variables = {"ANTHROPIC_API_KEY": "none", "ANTHROPIC_BASE_URL": url, "ANTHROPIC_MODEL": "lily"}
    return [npm("qwen"), "--auth-type", "anthropic", "--yolo", TASK], variables


def opencode(url, home):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url + "/v1", "apiKey": "none"},
        "models": {"lily": {}},
    }
    folder = home / ".config/opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(
        json.dumps({"model": "lily/lily", "provider": {"lily": provider}, "autoupdate": False})
    )
    return [npm("opencode"), "run", TASK], {}


# Calls of an agent's tools that read the word, and write it.


def shell_calls(folder):
    yield call("exec_command", {"cmd": "cat secret.txt"})
    yield call("exec_command", {"cmd": f"printf {WORD} > copy.txt"})


def patch_calls(folder):
    yield call("exec_command", {"cmd": "cat secret.txt"})
    patch = f"*** Begin Patch\n*** Add File: copy.txt\n+{WORD}\n*** End Patch"
    yield call("apply_patch", {"input": patch})


def code_calls(folder):
    for command in ["cat secret.txt", f"printf {WORD} > copy.txt"]:
        yield call("functions.exec", {"input": f'text(await tools.exec_command({{cmd: "{command}"}}));'})


def file_calls(read, write, path):
    def calls(folder):
        yield call(read, {path: folder / "secret.txt"})
        yield call(write, {path: folder / "copy.txt", "content": WORD})

    return calls


@pytest.mark.parametrize(
    "agent, calls",
    [
        (codex, shell_calls),
        (codex_with_patches, patch_calls),
        (codex_with_code, code_calls),
        (qwen, file_calls("read_file", "write_file", "file_path")),
        (qwen_with_messages, file_calls("read_file", "write_file", "file_path")),
        (opencode, file_calls("read", "write", "filePath")),
    ],
)
def test_a_loop_of_two_tools(agent, calls, serve_script, tmp_path):
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    (folder / "secret.txt").write_text(WORD)
    read, write = calls(folder)
    # The last one that has happened comes first.
    server = serve_script(
        ("copy.txt", f"It is done.\n</think>\n\n{ANSWER}"),
        (WORD, f"Now it is written.\n</think>\n\nI write it.\n\n{write}"),
        (TASK, f"First it is read.\n</think>\n\nI read it.\n\n{read}"),
    )
    command, variables = agent(server.url, home)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder, env={"PATH": NODE_PATH, "HOME": str(home), **LOOPBACK_ONLY, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
    )
    said = done.stdout + done.stderr + "".join(server.lines)
    assert done.returncode == 0, said
    assert ANSWER in done.stdout, said
    assert (folder / "copy.txt").read_text().rstrip() == WORD, said
    check_that_no_prompt_is_read_twice(server)


def check_that_no_prompt_is_read_twice(server):
    """Each turn of the loop, the longest prompts there are, begins with all of the one before."""
    counts = [re.search(r"prompt_tokens=(\d+) cached_tokens=(\d+)", line) for line in server.lines]
    turns = sorted(tuple(map(int, found.groups())) for found in counts if found)[-3:]
    assert len(turns) == 3
    for (prompt, _), (_, cached) in zip(turns, turns[1:]):
        assert cached >= prompt, turns
