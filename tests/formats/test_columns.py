"""A sheet with a line for each picture: each name is of one picture, or it is said which it may be."""

import cv2
import numpy as np
import pytest

from weldtrain.config import DatasetConfig
from weldtrain.errors import DataError
from weldtrain.formats.columns import Sheet


@pytest.fixture
def sheet(tmp_path):
    """`sheet("x.png,7")`: of two pictures of one name."""
    def make(*lines):
        for folder in "ab":
            (tmp_path / folder).mkdir()
            cv2.imwrite(str(tmp_path / folder / "x.png"), np.zeros((4, 4), np.uint8))
        (tmp_path / "films.csv").write_text("\n".join(["image,film,mm", *lines, ""]))
        cfg = DatasetConfig(root=str(tmp_path), picture_csv="films.csv", mm_per_pixel="mm")
        return Sheet(cfg, tmp_path, ["a/x.png", "b/x.png"])

    return make


def test_columns_of_one_sheet(sheet):
    films = sheet("b/x.png,7,0.1", "a/x.png,8,0.2", "other.png,9,no number")
    assert films.column("Film", "key") == ["8", "7"] and films.mm_per_pixel().tolist() == [0.2, 0.1]


def test_a_name_that_may_mean_two_pictures_is_told(sheet):
    with pytest.raises(DataError, match=r"films\.csv:3.*'x\.png' may mean a/x\.png or b/x\.png.*paths below"):
        sheet("b/x.png,7,1", "x.png,8,1").column("film", "key")
