"""Tables of boxes as converters, labelling tools, notebooks and spreadsheets write them."""

import pytest

from weldtrain.errors import DataError
from weldtrain.formats.record import DIFFICULT, ERROR, NOTE

BOX = (16.0, 12.0, 48.0, 36.0)
HEADER = "image,x1,y1,x2,y2,class\n"
ROW = "a.jpg,16,12,48,36,crack\n"


def table(tree, read, text, name="boxes.csv", **settings):
    """What is made of one table for the pictures a.jpg and b.jpg."""
    return read(tree({"a.jpg": None, "b.jpg": None, name: text}, "one"), "csv", missing="negative", **settings)


def said(reading, level=ERROR):
    return [f"{f.where()}: {f.text}" for f in reading.findings if f.level == level]


DIALECTS = {
    "as documented": HEADER + ROW,
    "TF object detection, size of the picture in it":
        "filename,width,height,class,xmin,ymin,xmax,ymax\na.jpg,64,48,crack,16,12,48,36\n",
    "corner and extent": "file_name,label,x,y,width,height\na.jpg,crack,16,12,32,24\n",
    "corner and extent, size of the picture as well": "image,width,height,class,x,y,w,h\na.jpg,64,48,crack,16,12,32,24\n",
    "bbox in one column": 'image_id,bbox,class\na,"[16, 12, 32.0, 24]",crack\n',
    "bbox of keras-retinanet, no header": "a.jpg,16,12,48,36,crack\n",
    "keras-retinanet with paths": "/home/me/x/a.jpg,16,12,48,36,crack\n",
    "makesense":
        "label_name,bbox_x,bbox_y,bbox_width,bbox_height,image_name,image_width,image_height\ncrack,16,12,32,24,a.jpg,64,48\n",
    "columns in any order and case": "CLASS , YMax,Xmax,YMIN,xMin , Image\ncrack,36,48,12,16,a.jpg\n",
    "semicolons": (HEADER + ROW).replace(",", ";"),
    "tabs": (HEADER + ROW).replace(",", "\t"),
    "mark and CRLF": b"\xef\xbb\xbf" + (HEADER + ROW).replace("\n", "\r\n").encode(),
    "utf-16": (HEADER + ROW).encode("utf-16"),
    "blanks, quotes, floats": HEADER + '"a.jpg" , 16.0,"12", 4.8e1 ,36.000 ," crack "\n',
    "an index in front": ",image,x1,y1,x2,y2,class\n0,a.jpg,16,12,48,36,crack\n",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_same_box_from_every_dialect(tree, read, dialect):
    reading = table(tree, read, DIALECTS[dialect])
    assert reading.boxes == {"a.jpg": [("crack", BOX)], "b.jpg": []} and not said(reading)


@pytest.mark.parametrize("text", [HEADER + ROW + "b.jpg,,,,,\n", ROW + "b.jpg,,,,,\n",
                                  DIALECTS["TF object detection, size of the picture in it"] + "b.jpg,64,48,,,,,\n",
                                  'image,bbox,class\na.jpg,"[16,12,32,24]",crack\nb.jpg,,\n',
                                  HEADER + ROW + ",,,,,\n\nb.jpg,,,,,\n"])
def test_a_row_with_a_picture_alone_says_that_it_has_no_defect(tree, read, text):
    reading = read(tree({"a.jpg": None, "b.jpg": None, "boxes.csv": text}), "csv")
    assert reading.boxes == {"a.jpg": [("crack", BOX)], "b.jpg": []} and not reading.findings


def test_a_picture_that_no_row_names_is_asked_about(tree, read):
    root = tree({"a.jpg": None, "b.jpg": None, "boxes.csv": HEADER + ROW})
    assert said(read(root, "csv"))[0].startswith("b.jpg: no annotation in boxes.csv")
    assert list(read(root, "csv", missing="skip").boxes) == ["a.jpg"]


def test_ids_stay_text(tree, read):
    ids = ["001", "010", "NA", "1e5", "true", "1.0", "裂 纹"]
    root = tree({**{f"{i}.jpg": None for i in ids}, "b.csv": HEADER + "".join(f"{i},16,12,48,36,{i}\n" for i in ids)})
    assert read(root, "csv").boxes == {f"{i}.jpg": [(i, BOX)] for i in ids}


@pytest.mark.parametrize("split", ["split", "Subset", "set"])
def test_a_column_of_splits_decides(tree, read, split):
    row = ROW.strip()
    reading = table(tree, read, f"image,x1,y1,x2,y2,class,{split}\n{row},TRAIN\n{row},train\nb.jpg,,,,,,Valid\n")
    assert reading.splits == {"a.jpg": "train", "b.jpg": "val"} and len(reading.boxes["a.jpg"]) == 2


def test_a_table_for_each_split_says_so_by_name_or_folder(tree, read):
    for names in (("train_labels.csv", "test_labels.csv"), ("train/b.csv", "test/b.csv"), ("weld-train.csv", "weld-test.csv")):
        reading = read(tree({"a.jpg": None, "b.jpg": None, "c.jpg": None, names[0]: HEADER + ROW,
                             names[1]: HEADER + ROW.replace("a.jpg", "b.jpg")}, names[0]), "csv")
        assert reading.splits == {"a.jpg": "train", "b.jpg": "test"}
        assert said(reading, NOTE) == [f"c.jpg: 1 pictures are not in {' and '.join(sorted(names))}: not used"]


def test_tables_in_the_folders_of_splits_take_the_pictures_beside_them(tree, read):
    reading = read(tree({f"{s}/{n}": c for s, label in (("train", "crack"), ("valid", "slag")) for n, c in (
        ("a.jpg", None), ("_annotations.csv", HEADER + ROW.replace("crack", label)))}), "csv")
    assert reading.boxes == {"train/a.jpg": [("crack", BOX)], "valid/a.jpg": [("slag", BOX)]} and not reading.findings
    assert reading.splits == {"train/a.jpg": "train", "valid/a.jpg": "val"}


def test_a_picture_in_two_splits_is_an_error_with_its_line(tree, read):
    reading = table(tree, read, "image,x1,y1,x2,y2,class,split\na.jpg,1,2,30,40,crack,train\na.jpg,16,12,48,36,crack,val\n")
    assert said(reading) == ["boxes.csv:3: a.jpg is in val here and in train before"]


def test_all_lost_pictures_are_named_with_their_lines_and_none_is_found_outside(tree, read):
    tree({"c.jpg": None}, "outside")
    reading = table(tree, read, HEADER + ROW + "../outside/c.jpg,1,2,3,4,crack\n\nd,1,2,3,4,crack\n")
    assert said(reading) == ["boxes.csv:3: '../outside/c.jpg' is nowhere below the root",
                             "boxes.csv:5: 'd' is nowhere below the root"]
    assert sorted(reading.boxes) == ["a.jpg", "b.jpg"]


@pytest.mark.parametrize("value", ["abc", "", "1_0", "0x10", "1,5", "12px", "True", "None", "1 2"])
@pytest.mark.parametrize("column", ["x1", "y1", "x2", "y2"])
def test_what_is_no_number_is_named_with_line_and_column_and_costs_no_other_row(tree, read, value, column):
    cells = dict(zip(("x1", "y1", "x2", "y2"), ("16", "12", "48", "36"))) | {column: f'"{value}"'}
    reading = table(tree, read, HEADER + ROW + f"a.jpg,{','.join(cells.values())},crack\n" + ROW)
    assert said(reading) == [f"boxes.csv:3: column {column} holds '{value}'"] and len(reading.boxes["a.jpg"]) == 2


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "Infinity", "1e999"])
@pytest.mark.parametrize("column", range(4))
def test_what_is_not_finite_is_dropped_and_never_a_wide_box(tree, read, value, column):
    for header, numbers in ((HEADER, [16, 12, 48, 36]), ("image,x,y,w,h,class\n", [16, 12, 32, 24])):
        numbers[column] = value
        reading = table(tree, read, header + f"a.jpg,{','.join(map(str, numbers))},crack\n{ROW.replace('48,36', '32,24')}")
        assert [(f.kind, f.line) for f in reading.findings if f.file == "boxes.csv"] == [("box-not-finite", 2)]
        assert len(reading.boxes["a.jpg"]) == 1


def test_empty_outside_and_repeated_boxes_are_named_by_their_line(tree, read):
    reading = table(tree, read, HEADER + "".join(f"a.jpg,{c},crack\n" for c in (
        "16,12,48,36", "9,9,9,20", "30,9,20,20", "70,9,90,20", "16,12,48,36", "-5,-5,99,99")))
    found = [(f.kind, f.line) for f in reading.findings if f.file == "boxes.csv"]
    assert found == [("box-empty", 3), ("box-empty", 4), ("box-outside", 5), ("box-twice", 6)]
    assert reading.boxes["a.jpg"] == [("crack", BOX), ("crack", BOX), ("crack", (0, 0, 64, 48))]


@pytest.mark.parametrize("rows", ["a.jpg,0.25,0.25,0.75,0.75,crack\n", "a.jpg,0.25,-0.01,0.75,1.01,crack\nb.jpg,0,0,1,1,slag\n"])
def test_shares_where_pixels_belong_are_refused(tree, read, rows):
    assert said(table(tree, read, HEADER + rows)) == ["boxes.csv: all coordinates are shares of the picture"]
    assert said(table(tree, read, rows)) == ["boxes.csv: all coordinates are shares of the picture"]


def test_a_box_without_a_class_is_an_error_and_difficult_is_kept(tree, read):
    rows = "a.jpg,16,12,48,36,,0\na.jpg,16,12,48,36,crack,1\na.jpg,1,2,30,40,no,0\n"
    reading = table(tree, read, "image,x1,y1,x2,y2,class,difficult\n" + rows)
    assert said(reading) == ["boxes.csv:2: a box without class"]
    assert reading.records["a.jpg"].flags.tolist() == [DIFFICULT, 0] and reading.records["a.jpg"].names == ["crack", "no"]


@pytest.mark.parametrize(("text", "message"), [
    ("", r"boxes\.csv: is no table"),
    ("image,class\na.jpg,crack\n", r"boxes\.csv:1: has no column for the corners; its columns are image, class; expected"),
    ("image,image,x1,y1,x2,y2,class\n", r"boxes\.csv"), (HEADER + "a.jpg,1,2,3,4,crack,more\n", r"boxes\.csv: is no table"),
    (HEADER, r"boxes\.csv: lists no picture"), (HEADER + "c.jpg,1,2,30,40,x\n", r"boxes\.csv: lists no picture .*'c\.jpg'"),
    ((HEADER + "裂.jpg,1,2,3,4,x\n").encode("gbk"), r"boxes\.csv: is not in utf-8"), (b"\x00\x01\xff", r"boxes\.csv")])
def test_what_is_no_table_of_boxes_is_one_clear_error(tree, read, text, message):
    with pytest.raises(DataError, match=message):
        table(tree, read, text, annotations="boxes.csv")


def test_a_table_with_a_broken_row_is_refused_rather_than_passed_over(tree, read):
    files = {"a.jpg": None, "b.jpg": None, "train.csv": HEADER + ROW + "b.jpg,1,2,3,4,crack,more\n", "val.csv": HEADER + ROW}
    with pytest.raises(DataError, match=r"train\.csv: is no table of columns \(.*line 3"):
        read(tree(files), "csv")


def test_other_tables_in_the_folder_are_left_alone(tree, read):
    root = tree({"a.jpg": None, "boxes.csv": HEADER + ROW, "results.csv": "epoch,loss\n1,2\n", "._boxes.csv": "mac",
                 "train_val_test_split.csv": "image_id,split\na,train\n", "empty.csv": ""})
    assert read(root, "csv").boxes == {"a.jpg": [("crack", BOX)]}
    assert read(root, "csv", split_csv="train_val_test_split.csv").splits == {"a.jpg": "train"}


def test_a_table_with_an_unnamed_first_column_is_no_crash(tree, read):
    reading = table(tree, read, ",image,x1,y1,x2,y2,class\n0,a.jpg,9,9,30,30,crack\n")
    assert reading.boxes["a.jpg"] == [("crack", (9, 9, 30, 30))]
    with pytest.raises(DataError, match="has no column for the"):
        table(tree, read, ",image_id,width,height,bbox,source\n0,a.jpg,64,48,\"[1,2,3,4]\",x\n")
