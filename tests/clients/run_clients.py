#!/usr/bin/env python3
"""Runs one file of end-to-end tests: run_clients.py DUNLIN TEST_FILE [pytest arguments].

ctest knows only the Python that was found when the build was configured; DN_PYTHON (set by ./dev test) has the client
packages. Without them the file is skipped, and says so.
"""
import importlib.util
import os
import sys

NEEDED = ("pytest", "httpx", "h2", "openai")


def main():
    binary, test = sys.argv[1:3]
    python = os.environ.get("DN_PYTHON", "")
    if python and os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(
            os.path.dirname(os.path.dirname(python))):
        os.execv(python, [python, os.path.abspath(__file__), *sys.argv[1:]])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"SKIPPED: {test}: no Python package {', '.join(missing)} "
              "(pip install -r tests/clients/requirements.txt, then DN_PYTHON=that python; ./dev test does it)")
        return
    if test == "test_model.py" and not os.environ.get("DN_MODEL"):
        print(f"SKIPPED: {test}: DN_MODEL is not set: no trained model (./dev test fetches one)")
        return
    mini = os.path.join(os.environ.get("DN_SHARED_DATA", ""), "mini", "mini-kimi", "config.json")
    if test == "test_kimi.py" and not os.path.exists(mini):
        print(f"SKIPPED: {test}: no {mini}")
        return
    os.environ["DN_DUNLIN"] = os.path.abspath(binary)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-B", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--durations=5",
                              "--durations-min=2", "--rootdir", here, os.path.join(here, test), *sys.argv[3:]])


main()
