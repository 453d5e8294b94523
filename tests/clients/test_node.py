"""Clients in Node."""

import os
import subprocess

from conftest import NODE_PATH, ROOT


def test_the_openai_package(lily, scripted):
    done = subprocess.run(
        ["node", "--test", "tests/clients/openai_package.test.mjs"],
        cwd=ROOT, env={**os.environ, "PATH": NODE_PATH, "LILY_URL": lily.url, "SCRIPTED_URL": scripted.url},
        capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 4" in done.stdout, done.stdout
