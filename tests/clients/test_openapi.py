"""Schemathesis sends requests that our own OpenAPI document allows, and some that it does not."""

import subprocess
import sys

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_answers_are_as_the_document_says(scripted, tmp_path):
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", scripted.url + "/openapi.json", "--checks", CHECKS,
        "--max-examples", "12", "--seed", "1", "--phases", "coverage,fuzzing", "--generation-database", "none",
        "--request-timeout", "20", "--no-color",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
