"""Pages come out of an installed wheel as they do here: templates, sheets and scripts are in it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from holdfast.web.pages.table import FILES

ROOT = Path(__file__).parents[2]
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
import holdfast
assert holdfast.__file__.startswith(sys.argv[1]), holdfast.__file__
from starlette.testclient import TestClient
from holdfast import App
from holdfast.web.asgi import WebApp
app = App("memory://", api_token="0123456789abcdef")
with TestClient(WebApp(app), headers={"Authorization": "Bearer 0123456789abcdef"}) as client:
    for path in ("/", "/invocations", "/queues", *sys.argv[2:]):
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:500])
app.close()
"""


def test_pages_work_from_a_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
    command = [sys.executable, "-c", ASK, str(installed), *(f"/static/{name}" for name in FILES)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
