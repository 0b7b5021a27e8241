"""Split files as spreadsheets write them."""

import pytest

from weldtrain.errors import DataError
from weldtrain.formats.splits import read_split_csv

EXPECTED = {"001": "train", "NA": "val", "1e5": "test"}


def splits(path):
    return {image_id: split for image_id, (split, _) in read_split_csv(path)[0].items()}


@pytest.mark.parametrize("data", [
    b"image_id,split\n001,train\nNA,val\n1e5,test\n",
    b"\xef\xbb\xbfimage_id,split\r\n001,train\r\nNA,val\r\n1e5,test\r\n",
    b"image_id;split\n001;train\nNA;val\n1e5;test",
    b"Image_ID\tSplit\n001\ttrain\nNA\tvalidation\n1e5\ttesting\n",
    b" image_id , split \n 001 , TRAIN \n NA , Valid \n\n 1e5,test \n",
    b"split,weld,image_id\ntrain,a,001\nval,b,NA\ntest,,1e5\n",
    '"image_id","split"\n"001","train"\n"NA","val"\n"1e5","test"\n'.encode("utf-16"),
], ids=["plain", "bom-crlf", "semicolon", "tab", "blanks", "columns", "utf-16"])
def test_the_same_splits_from_every_dialect(tmp_path, data):
    path = tmp_path / "s.csv"
    path.write_bytes(data)
    assert splits(path) == EXPECTED


@pytest.mark.parametrize(("data", "text"), [
    (b"", "s.csv"),
    (b"name,part\na,train\n", r"s\.csv:1: has no column 'image_id' \(found: name, part\)"),
    (b"image_id,split\na,train\na,val\n", r"s\.csv:3: 'a' is in val here and in train on line 2"),
    (b"image_id,split\na,train\n,val\n", r"s\.csv:3: a line without"),
    (b"image_id,split\na,train,x,y\nb,val\n", r"s\.csv"),
    ("image_id,split\n裂,train\n".encode("gbk"), "encoding"),
])
def test_what_is_wrong_is_named_with_its_line(tmp_path, data, text):
    (tmp_path / "s.csv").write_bytes(data)
    with pytest.raises(DataError, match=text):
        read_split_csv(tmp_path / "s.csv")


def test_an_absent_file_and_a_repeated_line(tmp_path):
    with pytest.raises(DataError, match=r"dataset\.split_csv"):
        read_split_csv(tmp_path / "none.csv")
    (tmp_path / "s.csv").write_text("image_id,split\na,train\na,train\n")
    found, findings = read_split_csv(tmp_path / "s.csv")
    assert list(found) == ["a"] and findings[0].line == 3


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_lines_are_counted_as_an_editor_counts_them(tmp_path, ends):
    (tmp_path / "s.csv").write_bytes(ends.join(["image_id,split", "a,train", "", " , ", "b,val", "a,test"]).encode())
    with pytest.raises(DataError, match=r"s\.csv:6: 'a' is in test here and in train on line 2"):
        read_split_csv(tmp_path / "s.csv")


def test_ids_stay_text_and_in_their_order(tmp_path):
    ids = ["010", "001", "NA", "null", "nan", "1e5", "true", "1.0", "-", "裂纹 1", "a,b", "'q'", "#3"]
    rows = "".join(f'"{i}",train\n' for i in ids)
    (tmp_path / "s.csv").write_text("image_id,split\n" + rows, "utf-8")
    assert list(splits(tmp_path / "s.csv")) == ids
