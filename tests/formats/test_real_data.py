"""Real data sets in every format that they come in: the counts of their README, and equal boxes from two formats."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from weldtrain.formats.record import DIFFICULT, ERROR

SETS = {  # folder, format: pictures by split, boxes by class, defect-free pictures
    ("welding_v2_real", "auto"): ({"train": 84, "val": 28, "test": 28}, {"Bad Weld": 134, "Good Weld": 175, "Defect": 178}, 0),
    ("weld_yolo", "auto"): ({"train": 84, "val": 28, "test": 28}, {"Bad Weld": 134, "Good Weld": 175, "Defect": 178}, 0),
    ("neu_det", "auto"): ({"train": 1620, "val": 180}, {"crazing": 689, "inclusion": 1011, "patches": 881, "pitted_surface": 432,
                                                        "rolled-in_scale": 628, "scratches": 548}, 0),
    ("lpbf_coco", "auto"): ({"train": 20, "val": 8, "test": 8}, {"defect": 1398}, 4),
    ("workpiece_crack_yolo", "auto"): ({"train": 60, "val": 16, "test": 2}, {"crack": 75}, 3),
}
SETS |= {("welding_v2_real", "welding_v2"): SETS["welding_v2_real", "auto"], ("weld_yolo", "yolo"): SETS["weld_yolo", "auto"],
         ("neu_det", "voc"): SETS["neu_det", "auto"], ("neu_det", "coco"): SETS["neu_det", "auto"],
         ("lpbf_coco", "coco"): SETS["lpbf_coco", "auto"], ("workpiece_crack_yolo", "yolo"): SETS["workpiece_crack_yolo", "auto"]}
LAYOUT = {"images": "images", "annotations": "annotations", "split_csv": "train_val_test_split.csv"}


@pytest.mark.parametrize(("folder", "fmt"), SETS)
def test_real_data_has_the_counts_of_its_readme(real_data, read, folder, fmt):
    reading = read(real_data / folder, fmt, **LAYOUT if fmt == "welding_v2" else {})
    names = Counter(name for record in reading.records.values() for name in record.names)
    splits, boxes, free = SETS[folder, fmt]
    assert (Counter(reading.splits.values()), names, sum(not r.names for r in reading.records.values())) == (splits, boxes, free)
    assert not [f for f in reading.findings if f.level == ERROR]


def test_difficult_and_repeated_boxes_of_neu_det_are_told(real_data, read):
    reading = read(real_data / "neu_det", "voc")
    assert sum(int((r.flags & DIFFICULT > 0).sum()) for r in reading.records.values()) == 81
    assert [f.file for f in reading.findings if f.kind == "box-twice"] == [
        f"Annotations/{n}.xml" for n in ("crazing_120", "inclusion_62", "patches_198")]
    used = read(real_data / "neu_det", "voc", difficult="use")
    assert not any(r.flags.any() for r in used.records.values())


def test_neu_det_as_voc_and_as_coco_gives_equal_boxes(real_data, read):
    """The COCO files hold x = xmin and width = xmax - xmin of the same 1-based corners."""
    voc, coco = (read(real_data / "neu_det", fmt, one_based=True) for fmt in ("voc", "coco"))
    assert voc.splits == coco.splits
    differ = [image for image, boxes in voc.boxes.items() if sorted(boxes) != sorted(coco.boxes[image])]
    assert not differ
    for record in voc.records.values():
        assert (record.boxes >= 0).all() and (record.boxes <= 200).all()


def test_the_welds_as_published_and_in_the_articles_layout_have_equal_boxes(real_data, read):
    def by_content(root, reading):
        found = {}
        for image, record in reading.records.items():
            key = hashlib.sha256((root / image).read_bytes()).hexdigest()
            found.setdefault(key, []).append((reading.splits[image], record.names, record.boxes.tolist()))
        return found

    published, article = (by_content(real_data / n, read(real_data / n, "auto")) for n in ("weld_yolo", "welding_v2_real"))
    assert published.keys() == article.keys() and len(published) == 139  # of 140 pictures two are the same file
    for key, copies in published.items():
        for (*split_and_names, boxes), (*same, same_boxes) in zip(sorted(copies), sorted(article[key])):
            assert split_and_names == same
            np.testing.assert_allclose(boxes, same_boxes, atol=1, rtol=0)
