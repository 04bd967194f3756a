"""Data sets by the names that configs use."""

from train.data.digits import Digits, DigitScenes
from train.data.hub import Hub
from train.data.images import Data, ImageData, ImageFolder, Images
from train.data.shards import ImageShards
from train.data.timm_sets import TimmData

DATA: dict[str, type[Data]] = {
    "digits": Digits,
    "digit_scenes": DigitScenes,
    "hub": Hub,
    "image_folder": ImageFolder,
    "image_shards": ImageShards,
    "timm": TimmData,
}

__all__ = [
    "DATA",
    "Data",
    "DigitScenes",
    "Digits",
    "Hub",
    "ImageData",
    "ImageFolder",
    "ImageShards",
    "Images",
    "TimmData",
]
