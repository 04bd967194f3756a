"""No position at all: the control of every comparison."""

from relpos2d.encoding import Encoding


class NoEncoding(Encoding):
    """Attention sees its tokens as a set."""

    name = "none"
    formula = "nothing"
