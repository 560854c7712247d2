"""Ids of the Hugging Face Hub: what is downloaded from a stand-in, and what somebody reads who cannot download."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from bundling import own_cache
from checkpoints import write_checkpoint, write_tokenizer
from huggingface_hub import close_session, constants
from stand_in_hub import COMMIT, StandIn, stand_in

from draftwood.builder.checkpoints.hub import ADAPTER, MEGABYTE, MODEL, HubId, Kind, Meter, hub_id, local_folder
from draftwood.builder.progress import Step
from draftwood.cli.main import main
from draftwood.cli.options import folder_or_id
from draftwood.models.errors import CheckpointError
from draftwood.runtime.bundle.bundle import EngineBundle

NOBODY = "http://127.0.0.1:9"  # the port of a service that no machine runs any more
SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """With a sharded target, a draft, an adapter, and repositories that are none of these."""
    root = tmp_path_factory.mktemp("hub")
    write_tokenizer(write_checkpoint(root / "org" / "target", shards=3, seed=1))
    draft = write_tokenizer(write_checkpoint(root / "org" / "draft.2", seed=2))
    write_adapter(root / "org" / "some-lora", draft)
    for name in ("pytorch_model.bin", "model.gguf", "other.safetensors", "optimizer.pt", "handler.py", "README.md"):
        (draft / name).write_bytes(b"not wanted")
    (draft / "additional_chat_templates").mkdir()
    (draft / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    (draft / "original").mkdir()
    (draft / "original" / "config.json").write_text("{}")

    pickled = write_checkpoint(root / "org" / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    large = write_checkpoint(root / "org" / "large")
    with (large / "tokenizer.json").open("wb") as file:
        file.truncate(300 << 20)
    with stand_in(root) as server:
        yield server


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does, which huggingface_hub reads when it is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)


@pytest.fixture(autouse=True)
def only_the_stand_in(hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reaches the real Hub, or this user's cache; each begins with an empty one."""
    point_to(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.chdir(tmp_path)
    hub.asked.clear()
    yield
    close_session()


class Heard:
    """What a build says: titles of its steps, with their units and how many were done."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []

    def begin(self, step: Step) -> Callable[[], None]:
        told: list[Any] = [step.title, step.units, 0]
        self.steps.append(told)

        def advance() -> None:
            told[2] += 1

        return advance


def refused(given: str, kind: Kind = MODEL) -> str:
    with pytest.raises(CheckpointError) as error:
        local_folder(Path(given), kind, Heard().begin)
    message = str(error.value)
    assert "\n" not in message and len(message) < 700
    return message


def test_a_build_from_ids(hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line downloads a sharded target at a revision, a draft and an adapter, and nothing else of them."""
    pair = ["--target", "org/target@v2", "--draft", "org/draft.2", "--draft-lora", "org/some-lora"]
    options = ["--backend", "onnxruntime", "--no-profile", "--widths", "1,4"]
    assert main(["build", *pair, "--output", "bundle", *options]) == 0
    assert "Downloading org/target@v2: weights, MB" in capsys.readouterr().out
    assert EngineBundle.open(tmp_path / "bundle").manifest.adapters == {"draft": "some-lora"}
    shards = [file.name for file in (hub.root / "org" / "target").glob("model-*")]
    assert len(shards) > 2
    wanted = {
        "org/target": [*SETTINGS, "model.safetensors.index.json", *shards],
        "org/draft.2": [*SETTINGS, "model.safetensors", "additional_chat_templates/tool_use.jinja"],
        "org/some-lora": ["adapter_config.json", "adapter_model.safetensors"],
    }
    assert sorted(hub.asked) == sorted(f"{name}/{file}" for name, files in wanted.items() for file in files)


def test_an_id_is_built_into_the_cache_once(
    hub: StandIn, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under its own name, which a download's folder does not have."""
    folders = []
    with own_cache(tmp_path_factory.mktemp("cache")):
        for told in (True, False):
            assert main(["build", "--target", "org/target@v2", "--max-length", "128", "--json"]) == 0
            out, notes = capsys.readouterr()
            folders.append(Path(json.loads(out)["bundle"]))
            assert ("Building a bundle of target@v2, once" in notes) == told
    assert folders[0] == folders[1] and folders[0].name.startswith("target-v2-")


def test_what_is_in_the_cache_is_not_asked_for_again(hub: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is found without a network, too."""
    first, again, offline = Heard(), Heard(), Heard()
    folder = local_folder(Path("org/draft.2"), MODEL, first.begin)
    assert folder.name == COMMIT and (folder / "model.safetensors").is_file()
    titles = ["Downloading org/draft.2: settings, MB", "Downloading org/draft.2: weights, MB"]
    assert first.steps == [[title, 1, 1] for title in titles]
    hub.asked.clear()
    assert local_folder(Path("org/draft.2"), MODEL, again.begin) == folder
    assert again.steps == first.steps and not hub.asked
    point_to(NOBODY, monkeypatch)
    assert local_folder(Path("org/draft.2"), MODEL, offline.begin) == folder
    assert offline.steps == [["Taking org/draft.2 from the cache: the Hub cannot be reached", 0, 0]]


def test_what_cannot_be_downloaded_says_how_to_get_it(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = "and give the folder: hf download org/{} --local-dir FOLDER, or git lfs install and git clone https://"
    message = refused("org/nothing")
    assert message.startswith("org/nothing is no folder here, and was not downloaded from the Hugging Face Hub (")
    assert by_hand.format("nothing") in message
    assert by_hand.format("target --revision v3") in refused("org/target@v3")
    assert refused("org/large").endswith("tokenizer.json has 314572800 bytes, too many")
    message = "org/pickled on the Hugging Face Hub has no model.safetensors, and nothing pickled is read"
    assert refused("org/pickled").startswith(message)
    assert not list(tmp_path.rglob("*.bin"))
    assert refused("org/draft.2", ADAPTER).endswith("has no adapter_config.json: choose a LoRA adapter of PEFT")
    assert refused("org/some-lora").endswith("has no config.json: choose a model in Hugging Face's format")
    monkeypatch.setattr(hub, "listed_commit", COMMIT[::-1])  # somebody pushes between the list and the first file
    assert refused("org/draft.2") == "org/draft.2 on the Hugging Face Hub was changed just now: try again"
    point_to(NOBODY, monkeypatch)
    assert by_hand.format("target") in refused("org/target")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = refused("org/name")
    assert message.startswith("org/name is no folder here. If it is an id of the Hugging Face Hub, pip install ")
    assert "or get it where there is a network, and give the folder: hf download org/name" in message


def test_a_path_that_is_there_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a link that leads nowhere; and nothing is imported for it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "link").symlink_to("nowhere")
    for given in (Path("org/name"), Path("org/link"), tmp_path / "missing", Path("one"), Path("a/b/c")):
        assert local_folder(given, MODEL, Heard().begin) == given


@pytest.mark.parametrize(
    ("name", "revision"),
    [("meta-llama/Llama-3.2-1B", None), ("org/name", "main"), ("org/name", "refs/pr/3"), ("org/name", COMMIT)],
)
def test_ids(name: str, revision: str | None) -> None:
    given = name if revision is None else f"{name}@{revision}"
    assert hub_id(Path(given)) == HubId(name, revision) and str(HubId(name, revision)) == given
    for text in (f"./{given}", "."):  # a path with a dot in front is never asked for
        assert hub_id(folder_or_id(text)) is None


@pytest.mark.parametrize(
    "given",
    [
        *("name", "a/b/c", "/org/name", "../name", "org/..", "org/.hidden", "org/a..b", "org/a--b", "-org/name"),
        *("org/a-", ".org/name", "org/na me", "org/näme", "org\\name", "org:name", "C:/name", "user@host/name"),
        *("org/name@", "org/name@../main", "org/name@a/../b", "org/name@/main", "org/name@-x", "org/name@a b"),
        *("org/name?x=1", "org/name#x", "org/name%2e%2e", "https://huggingface.co/org/name", "hf://org/name"),
        *("org/name\n", "org/name\0", "org/" + "x" * 97, "org/name@" + "x" * 256, "~/name", "$HOME/name", "."),
        *("models/target.gguf", "weights/model.safetensors", "folder/config.json"),
    ],
)
def test_what_is_no_id(given: str) -> None:
    assert hub_id(Path(given)) is None


def test_megabytes_are_counted_once() -> None:
    counted: list[int] = []
    meter = Meter(lambda: counted.append(1))
    for received in (0, MEGABYTE - 1, MEGABYTE, MEGABYTE, 3 * MEGABYTE + 5, 2 * MEGABYTE, 4 * MEGABYTE - 1):
        meter.reach(received)
    assert len(counted) == 3
