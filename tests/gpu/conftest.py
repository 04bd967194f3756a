"""What the tests of the trainer use too."""

from tests.train.conftest import digits_csv, forget_the_accelerator  # noqa: F401 (fixtures)
