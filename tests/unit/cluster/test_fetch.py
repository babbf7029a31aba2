"""Models on the volume of a cluster: what routers read comes first, copies never, and nothing where not all fits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from cluster.fetch import COMPLETE, READABLE, FetchError, Hub, HubModel, fetch_all, main, models_in, quantity

GIB = 1 << 30
COMMIT = "0123456789abcdef" * 2 + "01234567"
MODELS = {"large": HubModel("org/large", COMMIT), "small": HubModel("org/small")}


class FakeHub(Hub):
    """Repositories of some files; notes what is fetched, and ends at the first file called ``breaks``."""

    def __init__(self, breaks: str = "") -> None:
        self.repositories: dict[str, Mapping[str, int]] = {
            "org/large": {
                "config.json": 10,
                "tokenizer.json": 20,
                "model-1.safetensors": GIB,
                "original/consolidated.00.pth": 5 * GIB,
                "consolidated.safetensors": 5 * GIB,
                "pytorch_model.bin": 5 * GIB,
                "tf_model.h5": 5 * GIB,
                "model-Q4_K_M.gguf": 5 * GIB,
                "onnx/model.onnx": 5 * GIB,
                "onnx/model.onnx_data": 5 * GIB,
                "openvino/openvino_model.bin": 5 * GIB,
                "checkpoint-9/model.safetensors": 5 * GIB,
            },
            "org/small": {"tokenizer.json": 20, "model.safetensors": GIB},
        }
        self.fetched: list[str] = []
        self.breaks = breaks

    def files(self, model: HubModel) -> Mapping[str, int]:
        return self.repositories[model.name]

    def fetch(self, model: HubModel, files: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            if name == self.breaks:
                raise FetchError("gone")
            self.fetched.append(f"{model.name}/{name}")


def fetch(volume: Path, hub: FakeHub, capacity: int = 3 * GIB) -> None:
    fetch_all(volume, capacity, MODELS, hub, lambda line: None)


def test_what_routers_read_comes_first_and_copies_never(tmp_path: Path) -> None:
    hub = FakeHub()
    fetch(tmp_path, hub)
    assert hub.fetched == [
        "org/large/config.json",
        "org/large/tokenizer.json",
        "org/small/tokenizer.json",
        "org/large/model-1.safetensors",
        "org/small/model.safetensors",
    ]
    assert all((tmp_path / name / mark).exists() for name in MODELS for mark in (READABLE, COMPLETE))


@pytest.mark.parametrize(
    ("weights", "read"),
    [
        (["pytorch_model-1.bin", "pytorch_model-2.bin", "flax_model.msgpack"], 2),
        (["pytorch_model.bin", "adapter.safetensors", "model.gguf"], 2),
        (["model.gguf", "onnx/model.onnx"], 2),
    ],
)
def test_weights_in_no_safetensors_are_fetched_as_they_are(tmp_path: Path, weights: list[str], read: int) -> None:
    hub = FakeHub()
    hub.repositories["org/large"] = dict.fromkeys(weights, 1)
    fetch(tmp_path, hub)
    assert hub.fetched[1:-1] == [f"org/large/{name}" for name in weights[:read]]


def test_routers_need_not_wait_for_weights(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="gone"):
        fetch(tmp_path, FakeHub(breaks="model-1.safetensors"))
    assert all((tmp_path / name / READABLE).exists() for name in MODELS)
    assert not any((tmp_path / name / COMPLETE).exists() for name in MODELS)


def test_nothing_is_fetched_where_not_all_fits(tmp_path: Path) -> None:
    hub = FakeHub()
    why = r"the models take 2\.0 GiB \(large 1\.0 GiB, small 1\.0 GiB\), storage-size is 1\.9 GiB"
    with pytest.raises(FetchError, match=why):
        fetch(tmp_path, hub, int(1.9 * GIB))
    assert hub.fetched == []


def test_a_volume_that_is_smaller_than_it_was_asked_to_be_is_told(tmp_path: Path) -> None:
    hub = FakeHub()
    hub.repositories["org/large"] = {"model.safetensors": 1 << 60}
    with pytest.raises(FetchError, match="GiB are still to be fetched"):
        fetch(tmp_path, hub, 1 << 61)
    assert hub.fetched == []


def test_what_is_complete_is_not_asked_for_again_but_counts(tmp_path: Path) -> None:
    fetch(tmp_path, FakeHub())
    hub = FakeHub()
    hub.repositories.clear()
    fetch(tmp_path, hub)
    assert hub.fetched == []
    (tmp_path / "large" / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(FetchError, match="the models take"):
        fetch(tmp_path, hub, 99)


@pytest.mark.parametrize(
    "text", ["llama", "=org/name", "a/b=org/name", "../x=org/name", "llama=", "llama=@x", "a=org/b@"]
)
def test_an_entry_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(FetchError, match="is not FOLDER=HUB-ID, with @COMMIT or without"):
        models_in(text)


def test_a_model_is_pinned_by_a_whole_commit() -> None:
    models = models_in(f"a=org/a@{COMMIT} b=org/b@main c=org/c d=org/d@{COMMIT[:7]}")
    assert models["a"] == HubModel("org/a", COMMIT)
    assert [name for name, model in models.items() if model.pinned] == ["a"]


def test_the_hub_is_asked_for_that_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, object]] = []

    def note(_self: object, name: str, *, revision: object, **_others: object) -> SimpleNamespace:
        asked.append((name, revision))
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename="config.json", size=7)])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", note)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **others: note(None, name, **others))
    for model in MODELS.values():
        assert Hub().files(model) == {"config.json": 7}
        Hub().fetch(model, ["config.json"], tmp_path)
    assert asked == [("org/large", COMMIT)] * 2 + [("org/small", None)] * 2


@pytest.mark.parametrize("mark", [READABLE, COMPLETE])
def test_another_revision_is_not_mixed_into_a_folder(tmp_path: Path, mark: str) -> None:
    fetch(tmp_path, FakeHub())
    if mark == READABLE:
        (tmp_path / "large" / COMPLETE).unlink()
    hub = FakeHub()
    other = {**MODELS, "large": HubModel("org/large", COMMIT[::-1])}
    with pytest.raises(FetchError, match=f"large holds org/large@{COMMIT}; give org/large@{COMMIT[::-1]} a folder"):
        fetch_all(tmp_path, 3 * GIB, other, hub, lambda line: None)
    assert hub.fetched == []


def test_sizes_are_those_of_kubernetes() -> None:
    assert [quantity(text) for text in ("100Gi", "1T", "1.5Ki", "12")] == [100 << 30, 10**12, 1536, 12]
    with pytest.raises(FetchError, match="no size"):
        quantity("much")


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "much", "a=b"]) == 1
    assert capsys.readouterr().err == "cluster.fetch: 'much' is no size such as 100Gi\n"
