"""Data sets by the names that configs use."""

from train.data.boxes import Boxed, BoxedImages, DetectionData
from train.data.coco import Coco
from train.data.code import Code
from train.data.digit_boxes import DigitBoxes
from train.data.digits import Digits, DigitScenes
from train.data.headlines import Headlines
from train.data.hub import Hub
from train.data.images import Data, ImageData, ImageFolder, Images
from train.data.news import News
from train.data.order import Order
from train.data.prompts import Prompts
from train.data.recordings import Recordings, SpeechData
from train.data.shards import ImageShards
from train.data.speech_folder import SpeechFolder
from train.data.speech_hub import SpeechHub
from train.data.speech_jsonl import SpeechJsonl
from train.data.text_folder import TextFolder
from train.data.text_hub import TextHub
from train.data.text_jsonl import TextJsonl
from train.data.texts import Labelled, Pairs, Running, TextData
from train.data.timm_sets import TimmData
from train.data.trees import Trees
from train.data.verses import Verses

DATA: dict[str, type[Data]] = {
    "coco": Coco,
    "code": Code,
    "digit_boxes": DigitBoxes,
    "digits": Digits,
    "digit_scenes": DigitScenes,
    "headlines": Headlines,
    "hub": Hub,
    "image_folder": ImageFolder,
    "image_shards": ImageShards,
    "news": News,
    "order": Order,
    "prompts": Prompts,
    "speech_folder": SpeechFolder,
    "speech_hub": SpeechHub,
    "speech_jsonl": SpeechJsonl,
    "text_folder": TextFolder,
    "text_hub": TextHub,
    "text_jsonl": TextJsonl,
    "timm": TimmData,
    "trees": Trees,
    "verses": Verses,
}

__all__ = [
    "DATA",
    "Boxed",
    "BoxedImages",
    "Coco",
    "Code",
    "Data",
    "DetectionData",
    "DigitBoxes",
    "DigitScenes",
    "Digits",
    "Headlines",
    "Hub",
    "ImageData",
    "ImageFolder",
    "ImageShards",
    "Images",
    "Labelled",
    "News",
    "Order",
    "Pairs",
    "Prompts",
    "Recordings",
    "Running",
    "SpeechData",
    "SpeechFolder",
    "SpeechHub",
    "SpeechJsonl",
    "TextData",
    "TextFolder",
    "TextHub",
    "TextJsonl",
    "TimmData",
    "Trees",
    "Verses",
]
