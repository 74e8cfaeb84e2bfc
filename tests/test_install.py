"""The guide's block for an environment without NVIDIA's libraries: run against an index on this machine that tells what was loaded."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import subprocess
import sys
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pytest_gpumem.emulating.emulation.torch_build import requirement
from tests.workflows import ACTION, read_yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide" / "no-gpu.md").read_text(encoding="utf-8")
(BLOCK,) = re.findall(r"^```sh\n([^`]*Requires-Dist[^`]*)^```$", GUIDE, flags=re.MULTILINE)
(EDIT,) = re.findall(r"^sed .*$", BLOCK, flags=re.MULTILINE)
# As torch's own metadata has them.
TORCH_2_15 = """\
filelock
typing-extensions>=4.13.0
setuptools>=77.0.3
sympy>=1.13.3
networkx>=2.5.1
jinja2
fsspec>=0.8.5
cuda-toolkit[cublas,cudart,cufft,cufile,cupti,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.2.2; platform_system == "Linux"
cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"
nvidia-cudnn-cu13==9.26.0.51; platform_system == "Linux"
nvidia-cusparselt-cu13==0.8.1; platform_system == "Linux"
nvidia-nccl-cu13==2.30.7; platform_system == "Linux"
nvidia-nvshmem-cu13==3.7.2; platform_system == "Linux"
triton~=3.9.0; platform_system == "Linux" and python_version < "3.16"
optree>=0.13.0; extra == "optree"
""".splitlines()
TORCH_2_6 = """\
filelock
nvidia-cublas-cu12 (==12.4.5.8) ; platform_system == "Linux" and platform_machine == "x86_64"
nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == "Linux" and platform_machine == "x86_64"
triton (==3.2.0) ; platform_system == "Linux" and platform_machine == "x86_64"
""".splitlines()


def metadata_of(name: str, version: str, requires: Iterable[str]) -> str:
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    return "\n".join(lines) + "\n"


def write_wheel(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> None:
    """A package of no files, which says what it requires."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": metadata_of(name, version, requires),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: it\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        record = ""
        for file, text in files.items():
            path = f"{stem}.dist-info/{file}"
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text.encode())}\n"
            wheel.writestr(path, text)
        wheel.writestr(f"{stem}.dist-info/RECORD", f"{record}{stem}.dist-info/RECORD,,\n")


def write_wheels(folder: Path) -> None:
    """torch, this package, and all that they require, each in a release that is allowed."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    write_wheel(folder, "torch", "2.15.0", TORCH_2_15)
    write_wheel(folder, "pytest-gpumem", "0.1.0", ours)
    releases: dict[str, str] = {}
    for one in map(Requirement, [*ours, *TORCH_2_15]):
        allowed = [part.version for part in one.specifier if part.operator in ("==", "~=", ">=")]
        # The newest lower bound is in every range here.
        releases[one.name] = max([releases.get(one.name, "0"), *allowed], key=lambda text: [*map(int, text.split("."))])
    for name, version in releases.items():
        if name != "torch":
            write_wheel(folder, name, version)


@contextmanager
def index_of(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the wheels of a folder as an index (PEP 503): its URL, and the names of the packages that are loaded from it."""
    loaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            *_, place, name = self.path.rstrip("/").split("/")
            if place == "simple":
                wheels = [file.name for file in folder.iterdir() if canonicalize_name(file.name.split("-")[0]) == name]
                body = "".join(f'<a href="/wheels/{wheel}">{wheel}</a>' for wheel in wheels).encode()
            else:
                loaded.append(canonicalize_name(name.split("-")[0]))
                body = (folder / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if place == "simple" else "application/zip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", loaded
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shell(script: str, folder: Path, index: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "NO_PROXY": "127.0.0.1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    command = ["bash", "-e", "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_nvidia(names: Iterable[str]) -> list[str]:
    """Those of its libraries; nvidia-ml-py asks a driver for what it knows, and is 50 kB."""
    return [name for name in names if name.startswith(("nvidia-", "cuda-")) and name != "nvidia-ml-py"]


@pytest.mark.thorough
def test_the_guides_environment_has_all_but_nvidias_libraries(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheels(wheels)
    with index_of(wheels) as (index, loaded):
        said = shell(f"{BLOCK}\npip check", tmp_path, index)
        assert "No broken requirements found." in said
        assert of_nvidia(loaded) == []
        assert {"torch", "triton", "sympy", "pytest-gpumem", "pytest", "greenlet"} <= {*loaded}


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["-r requirements.txt", "'accelerate>=1'"], ids=["pinned", "required"])
def test_the_action_loads_all_but_nvidias_libraries(tmp_path, asked):
    """Also where torch is asked for by another package, and its release is what pip chooses."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheels(wheels)
    write_wheel(wheels, "accelerate", "1.0", ["torch>=2.6", "pytest-gpumem"])
    (tmp_path / "requirements.txt").write_text("torch==2.15.0\npytest-gpumem\n", encoding="utf-8")
    install = read_yaml(ACTION.read_text(encoding="utf-8"))["runs"]["steps"][0]["run"]
    with index_of(wheels) as (index, loaded):
        variables = {
            "PYTHON": "emulated/bin/python",
            "EMULATED": "true",
            "INSTALL": asked,
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "GITHUB_ACTION_PATH": str(ROOT),
        }
        exported = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        shell(f"python3 -m venv emulated\n{exported}{install}", tmp_path, index)
        # To look for a torch that is not named, pip reads wheels here, as this index has no metadata beside them.
        assert of_nvidia(loaded) == [] or "accelerate" in asked
        said = shell(
            "emulated/bin/python -m pip list --format=freeze && emulated/bin/python -m pip check", tmp_path, index
        )
        installed = {line.partition("==")[0] for line in said.splitlines()}
        assert of_nvidia(installed) == []
        assert {"torch", "triton", "sympy", "pytest-gpumem", "pytest", "greenlet"} <= installed
        assert "No broken requirements found." in said


@pytest.mark.thorough
def test_without_the_edit_the_last_line_of_the_guides_block_loads_them(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheels(wheels)
    with index_of(wheels) as (index, loaded):
        shell(BLOCK, tmp_path, index)
        shell(". emulated/bin/activate && pip install --quiet --no-deps --force-reinstall torch", tmp_path, index)
        shell(f". emulated/bin/activate\n{BLOCK.splitlines()[-1]} --dry-run", tmp_path, index)
        assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-toolkit", "cuda-bindings"} <= {*of_nvidia(loaded)}


@pytest.mark.parametrize("required", [TORCH_2_15, TORCH_2_6], ids=["2.15", "2.6"])
def test_what_torch_requires_of_nvidia_is_an_extras_and_still_told(tmp_path, monkeypatch, required):
    path = tmp_path / "METADATA"
    path.write_text(metadata_of("torch", "2.15.0", required), encoding="utf-8")
    expression = EDIT[: EDIT.index(' "$(')]
    for _ in range(2):  # it may be run again
        subprocess.run(["bash", "-c", f"{expression} METADATA"], cwd=tmp_path, check=True)
    lines = [line.partition(": ")[2] for line in path.read_text(encoding="utf-8").splitlines() if "Requires" in line]
    asked = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})]
    kept = [one for one in map(Requirement, required) if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert [one.name for one in asked] == [one.name for one in kept if not of_nvidia([one.name])]
    # The release of cuDNN is what an emulated GPU says that it has.
    monkeypatch.setattr("pytest_gpumem.emulating.emulation.torch_build.requires", lambda name: lines)
    assert requirement("nvidia-cudnn-cu") in {"nvidia-cudnn-cu13==9.26.0.51", "nvidia-cudnn-cu12==9.1.0.70"}


def test_make_leaves_them_out_in_the_same_way():
    (line,) = re.findall(r"^WITHOUT_NVIDIA := (sed .*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert EDIT.startswith(f"{line} ")
