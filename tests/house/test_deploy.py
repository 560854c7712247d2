"""The container files: what they name exists, and the commands in them are ones that draftwood takes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bundling import ROOT

from draftwood.cli.main import arguments
from draftwood.cli.serve import API_KEY
from draftwood.plugins.native.cache import CACHE

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = ROOT / "deploy" / "docker"
TRITON = ROOT / "deploy" / "kubernetes" / "Dockerfile"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert set(content) == {"services", "volumes"}
    for service in content["services"].values():
        named = {volume.split(":")[0] for volume in service["volumes"]} & set(content["volumes"])
        assert named, "a cache for kernels"
    return dict(content["services"])


def instructions(name: str) -> dict[str, list[str]]:
    """The arguments of each kind of instruction in a Dockerfile."""
    text = re.sub(r"\\\n", "", (ROOT / name).read_text())
    found: dict[str, list[str]] = {}
    for kind, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.M):
        found.setdefault(kind, []).append(rest)
    return found


def test_builds_begin_in_the_repository_with_files_of_it(services: dict[str, Any]) -> None:
    for service in services.values():
        assert (FOLDER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "dist/" not in ignored, "Triton's image takes the wheel from there"
    assert {".*", "build/", "bundles/"} <= set(ignored)


def test_the_image_runs_a_command_that_draftwood_takes() -> None:
    found = instructions("deploy/docker/Dockerfile")
    assert json.loads(found["ENTRYPOINT"][0]) == ["draftwood"]
    parsed = arguments(json.loads(found["CMD"][0]))
    assert (parsed.model, parsed.host) == ("/bundle", "0.0.0.0")
    assert str(parsed.port) in found["EXPOSE"][0]
    (variable,) = (each.split("=") for each in found["ENV"])
    assert variable == [CACHE, "/cache"] and json.loads(found["VOLUME"][0]) == ["/cache"]
    assert found["USER"] == ["draftwood"], "not root"


def test_only_this_machine_reaches_the_ports(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports) and len(ports) == len(set(ports))
    assert services["serve"]["environment"] == [API_KEY]
    assert services["triton"]["environment"] == {CACHE: "/cache"}


def test_the_extras_of_the_images_exist(services: dict[str, Any]) -> None:
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = ", project, re.M))
    installed = re.findall(r"\[([\w,]+)\]", instructions("deploy/docker/Dockerfile")["RUN"][2])[0]
    assert set(installed.split(",")) <= extras
    assert set(services["triton"]["build"]["args"]["EXTRA"].split(",")) <= extras
    assert "ARG EXTRA=" in TRITON.read_text()


def test_containers_get_the_time_to_finish_requests(services: dict[str, Any]) -> None:
    drained = arguments(["serve", "/bundle"]).drain_timeout
    assert int(services["serve"]["stop_grace_period"][:-1]) > drained
    ends = next(each for each in services["triton"]["command"] if each.startswith("--exit-timeout-secs="))
    assert int(services["triton"]["stop_grace_period"][:-1]) > int(ends.partition("=")[2])
