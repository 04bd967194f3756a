"""Models of text and speech, with positions by any encoding of one axis, and detectors on timm backbones."""

from relpos2d.models.cache import Cache
from relpos2d.models.conformer import ConformerCTC, CTCOutput
from relpos2d.models.detection import create_detector
from relpos2d.models.encoder_decoder import EncoderDecoder
from relpos2d.models.generation import generate
from relpos2d.models.language_model import LanguageModel
from relpos2d.models.text_classifier import TextClassifier

__all__ = [
    "CTCOutput",
    "Cache",
    "ConformerCTC",
    "EncoderDecoder",
    "LanguageModel",
    "TextClassifier",
    "create_detector",
    "generate",
]
