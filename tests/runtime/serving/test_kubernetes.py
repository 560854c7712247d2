"""The manifests agree with each other, and with what the server exports, takes and answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bundling import ROOT

from draftwood.runtime.decoding.queue import FairQueue, QueueFullError
from draftwood.runtime.decoding.scheduler import MAX_RUNNING, out_of_memory
from draftwood.runtime.requests.metrics import GAUGES, ServingMetrics
from draftwood.runtime.serving.places import Places
from draftwood.runtime.serving.triton.contract import OPTIONAL_INPUTS, PROMPT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = ROOT / "deploy" / "kubernetes"
MODEL = "draftwood"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Every object of every manifest, by kind."""
    found = [each for file in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]
    assert all({"apiVersion", "kind", "metadata", "spec"} <= each.keys() for each in found)
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


@pytest.fixture
def container(objects: dict[str, Any]) -> Any:
    (only,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def test_selectors_ports_and_targets_exist(objects: dict[str, Any], container: Any) -> None:
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container["ports"]}
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    for kind in ("Deployment", "PodMonitor", "PodDisruptionBudget"):
        assert objects[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} <= ports
    assert {each["port"] for each in objects["PodMonitor"]["spec"]["podMetricsEndpoints"]} <= ports
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness")} <= ports
    assert objects["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    volumes = {volume["name"] for volume in objects["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_it_scales_on_what_the_server_exports(objects: dict[str, Any]) -> None:
    exported = ServingMetrics().to_prometheus(dict.fromkeys(GAUGES, 0.0))
    scaled = {}
    for trigger in objects["ScaledObject"]["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        (name,) = re.findall(r"draftwood_\w+", query)
        scaled[name] = float(trigger["metadata"]["threshold"])
        assert name in GAUGES and f"\n{name} " in f"\n{exported}"
        assert set(re.findall(r'(\w+)="', query)) <= {"model", "version", "instance"}, "labels that Triton's page has"
        assert f'model="{MODEL}"' in query
    assert "draftwood_requests_waiting" in scaled
    assert scaled["draftwood_requests_running"] < MAX_RUNNING, "scales before all places of a replica are taken"


def test_liveness_is_an_inference_that_a_busy_server_passes(container: Any) -> None:
    probe = container["livenessProbe"]
    script = probe["exec"]["command"][-1]
    body = json.loads(re.findall(r"--data '(.*?)'", script)[0])
    assert body.keys() <= {PROMPT.name, *(tensor.name for tensor in OPTIONAL_INPUTS), "timeout"}
    assert f"/v2/models/{MODEL}/generate" in script and f"--load-model={MODEL}" in container["command"]
    limit = float(re.findall(r"--max-time (\d+)", script)[0])
    assert body["timeout"] / 1e6 < limit < probe["timeoutSeconds"] <= probe["periodSeconds"]
    scheduler: FairQueue[int] = FairQueue(1, 0)
    scheduler.submit(1)
    with pytest.raises(QueueFullError) as full:
        scheduler.submit(2)
    (pattern,) = re.findall(r"--extended-regexp '(.*?)'", script)
    for error in (full.value, out_of_memory(), Places(0).shortage("")):
        assert re.search(pattern, str(error))


def test_a_pod_lives_until_requests_in_flight_are_finished(objects: dict[str, Any], container: Any) -> None:
    (finishing,) = (int(each.partition("=")[2]) for each in container["command"] if each.startswith("--exit-timeout"))
    leaving = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert leaving + finishing < objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_image_installs_an_extra_that_exists() -> None:
    (extra,) = re.findall(r"^ARG EXTRA=(\w+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert re.search(rf"^{extra} = \[", extras, re.MULTILINE)
