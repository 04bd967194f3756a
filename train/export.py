"""`python -m train.export CHECKPOINT --to FORMAT OUT`: a trained model for use elsewhere."""

import argparse
import importlib.util
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

from relpos2d.backbones.registry import SOURCES
from train.config import Backbone, encoding_argument
from train.data import Images
from train.data.images import ImageData
from train.restore import Restored, load_strictly, restore, without_pretrained
from train.tasks.classify import create_backbone
from train.tool import check_free, create_parser, run_command, run_tool, written_aside

TOLERANCE = 1e-4  # between the logits of ONNX Runtime and ours


def main(arguments: Sequence[str] | None = None) -> int:
    parser = create_parser("export", "Writes a trained model in a format that others read: all of it, or nothing.")
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(FORMATS),
        help="safetensors: one file of weights, with model, encoding and classes as JSON in its metadata. onnx: one file, for "
        "any number of images at a time. timm: a folder for timm.create_model('local-dir:OUT', pretrained=True) after "
        "import relpos2d. Models of text and speech: safetensors only, their tokenizer.json lies in the run's folder",
    )
    parser.add_argument("out", metavar="OUT", help="the file or folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where there is one")
    return run_tool(export, parser.parse_intermixed_args(arguments))


def export(given: argparse.Namespace) -> int:
    out = Path(given.out)
    if not given.overwrite:
        check_free(out, "--overwrite replaces it")
    restored = restore(given.checkpoint, given.weights)
    if restored.config.task != "classify" and given.to != "safetensors":
        raise ValueError(
            f"--to {given.to}: is for classifiers of images, {given.checkpoint} is a run of {restored.config.task}; "
            f"allowed: safetensors"
        )
    with written_aside(out) as aside:
        note = FORMATS[given.to](restored, aside)
    print(f"{out}: {note}")
    return 0


def to_safetensors(restored: Restored, path: Path) -> str:
    """The weights under their names in the model; the metadata say which model that is."""
    about = {
        "model": restored.config.model.name,
        "model_args": restored.config.model.given(),
        "encoding": encoding_argument(restored.config),
        "step": restored.step,
        "weights": restored.weights,
        **restored.description.model_dump(mode="json"),
    }
    save_file(copied(restored.model), path, metadata={key: json.dumps(value) for key, value in about.items()})
    return f"{len(restored.model.state_dict())} tensors"


def to_onnx(restored: Restored, path: Path) -> str:
    """One file with `images` (batch, channels, height, width) and `logits` (batch, classes).

    Raises:
        ValueError: the exporter is not installed, or ONNX Runtime computes something else.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise ValueError("export to ONNX needs onnxscript: pip install onnxscript")
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.export.export(
            restored.model, (example(restored, 2),), dynamic_shapes=({0: batch},), strict=False
        )
        torch.onnx.export(
            program,
            (),
            str(path),
            dynamo=True,
            verbose=False,
            external_data=False,
            input_names=["images"],
            output_names=["logits"],
        )
    if importlib.util.find_spec("onnxruntime") is None:
        return "not checked, as onnxruntime is not installed"
    largest = max(onnx_difference(restored, path, batch_size) for batch_size in (1, 3))
    if not largest < TOLERANCE:
        raise ValueError(
            f"export to ONNX: the logits differ from the model's by {largest:.1e}, allowed is {TOLERANCE:.0e}"
        )
    return f"the logits differ from the model's by at most {largest:.1e}"


def onnx_difference(restored: Restored, path: Path, batch_size: int) -> float:
    """The largest difference between the logits of an ONNX file and of the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = example(restored, batch_size)
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    with torch.no_grad():
        return float((torch.from_numpy(logits) - restored.model(images)).abs().max())


def to_timm(restored: Restored, folder: Path) -> str:
    """timm's own local layout: config.json and model.safetensors.

    Raises:
        ValueError: no registered model has this architecture, or what timm loads computes something else.
    """
    name = restored.config.model.name
    registered = name if name in SOURCES else f"relpos2d_{name}"
    if registered not in SOURCES:
        raise ValueError(
            f"export to timm: {name} with an encoding is no registered model, so timm could not build it; "
            f"registered are {', '.join(SOURCES)}. The other formats take any model"
        )
    model = restored.model
    if registered != name:
        config = restored.config
        renamed = config.model_copy(update={"model": config.model.model_copy(update={"name": registered})})
        model = create_backbone(without_pretrained(renamed), cast(Images, restored.description)).eval()
        load_strictly(model, restored.model.state_dict(), restored.checkpoint, renamed)

    description, data = restored.description, restored.config.data
    about: dict[str, Any] = {"label_names": list(description.classes)}
    if (
        isinstance(restored.config.model, Backbone) and not restored.config.model.pretrained
    ):  # then these speak of weights that ours do not come from
        about["pretrained_cfg"] = {"tag": None, "license": None}
    seen: dict[str, Any] = {
        "input_size": (description.num_channels, description.height, description.width),
        "mean": description.mean,
        "std": description.std,
    }
    if isinstance(data, ImageData):
        interpolation = "bicubic" if data.interpolation == "random" else data.interpolation
        seen |= {"crop_pct": data.crop_fraction, "crop_mode": "center", "interpolation": interpolation}
    else:
        seen |= {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"}
    save_for_hf(model, str(folder), model_config=about, data_config=seen, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = example(restored, 2)
    with torch.no_grad():
        if not torch.equal(loaded(images), restored.model(images)):
            raise ValueError("export to timm: what timm loads from the folder computes something else")
    return f"{registered}, loads with timm.create_model('local-dir:...', pretrained=True) after import relpos2d"


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with memory of its own for each name, which safetensors wants."""
    return {key: value.contiguous().clone() for key, value in model.state_dict().items()}


def example(restored: Restored, batch_size: int) -> torch.Tensor:
    """Random images as the model takes them; always the same."""
    description = restored.description
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch_size, description.num_channels, description.height, description.width, generator=generator)


FORMATS: dict[str, Any] = {"safetensors": to_safetensors, "onnx": to_onnx, "timm": to_timm}

if __name__ == "__main__":
    run_command(main)
