"""task=predict: every picture once, whatever stands beside it, the same boxes however they are batched and tiled, and a list of
bad files."""

import csv
import json
import signal
from dataclasses import asdict, replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from weldtrain.config import DatasetConfig, LoaderConfig
from weldtrain.data.dataset import DetectionDataset
from weldtrain.data.indexing import open_index
from weldtrain.data.loader import evaluation_loader
from weldtrain.data.synthetic import CLASSES
from weldtrain.engine.device import choose_device
from weldtrain.engine.evaluator import evaluate
from weldtrain.engine.trained import Trained
from weldtrain.errors import ConfigError, DataError, TrainingError
from weldtrain.formats import written
from weldtrain.interruption import Interrupted
from weldtrain.tasks import predict
from weldtrain.telemetry.record import RunRecord


@pytest.fixture
def predicted(configured, guessing, tmp_path):
    """`predicted(source, "predict.tiles=64")`: the run directory of a prediction; its error is in `raised`."""
    def run(source, *overrides, place="run", model=None, raises=None):
        cfg = configured("task=predict", f"checkpoint={model or guessing()}", f"predict.source='{source}'",
                         "predict.threshold=0.3", *overrides)
        with RunRecord(tmp_path / place, asdict(cfg)) as record:
            if raises:
                with pytest.raises(DataError, match=raises) as caught:
                    predict.run(cfg, record)
                run.raised = str(caught.value)
            else:
                predict.run(cfg, record)
        run.summary = record.summary
        return record.dir

    return run


@pytest.fixture
def tree(welds, tmp_path):
    """Pictures of one name in two folders, one with another suffix, and what is no picture."""
    root = tmp_path / "in"
    sources = sorted((welds / "images").iterdir())
    for name, picture in zip(("A/w1.jpg", "B/w1.jpg", "c d/ü.jpg"), sources):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture.read_bytes())
    cv2.imwrite(str(root / "B/w1.png"), cv2.imread(str(sources[3])))
    (root / "note.txt").write_text("hello")
    (root / "empty").mkdir()
    return root


def findings(folder):
    """By picture the boxes and scores of its COCO results."""
    names = {p["id"]: p["file_name"] for p in json.loads((folder / written.PICTURES).read_text())["images"]}
    found = {name: [] for name in names.values()}
    for result in json.loads((folder / written.RESULTS).read_text()):
        assert names[result["image_id"]] == result["file_name"]
        found[result["file_name"]].append((*result["bbox"], result["category_id"], result["score"]))
    return {name: np.array(sorted(rows)).reshape(-1, 6) for name, rows in found.items()}


def same(one, other):
    assert one.keys() == other.keys() and sum(map(len, one.values())) > 10
    for name in one:
        assert np.allclose(one[name], other[name], atol=1e-3), name


def test_the_tree_is_mirrored_and_each_picture_has_one_entry_in_every_form(predicted, tree):
    folder = predicted(tree, "predict.save=[pictures,json,csv,voc,yolo]")
    names = ["A/w1.jpg", "B/w1.jpg", "B/w1.png", "c d/ü.jpg"]
    assert list(findings(folder)) == names
    assert {p.relative_to(folder / "pictures").as_posix() for p in (folder / "pictures").rglob("*.*")} == {
        "A/w1.jpg", "B/w1.jpg.jpg", "B/w1.png.jpg", "c d/ü.jpg"}
    assert cv2.imread(str(folder / "pictures/A/w1.jpg")).shape == cv2.imread(str(tree / "A/w1.jpg")).shape
    for suffix in ("xml", "txt"):
        assert {p.stem for p in folder.rglob(f"*/w1*.{suffix}")} == {"w1", "w1.jpg", "w1.png"}
    with open(folder / "predictions.csv", encoding="utf-8") as file:
        assert {row["image"] for row in csv.DictReader(file)} == set(names)
    info = json.loads((folder / written.PICTURES).read_text())["info"]
    assert info["thresholds"] == dict.fromkeys(CLASSES, 0.3) and info["checkpoint"].endswith("guessing.pt")
    assert not (folder / "pictures.idx").exists() and not (folder / predict.UNREAD).exists()
    assert predicted.summary["pictures"] == 4 and sum(predicted.summary["found"].values()) == sum(
        len(rows) for rows in findings(folder).values())


def test_what_is_written_inside_the_source_is_never_predicted(predicted, tree):
    one, other = (findings(predicted(tree, place=f"in/out/{n}")) for n in "ab")
    same(one, other)
    assert len(one) == 4 and len(list((tree / "out").iterdir())) == 2


def test_only_what_weldtrain_drew_is_left_out(predicted, tree, tmp_path):
    (tree / "metrics.jsonl").write_text("{}\n")  # of another program
    (tree / "pictures").mkdir()
    (tree / "pictures/w9.jpg").write_bytes((tree / "A/w1.jpg").read_bytes())
    assert len(findings(predicted(tree))) == 5
    run = predicted(tree, place="out")
    predicted(run, place="again", raises="holds no picture but those that weldtrain drew: .*in/|out/pictures to take them")
    assert len(findings(predicted(run / "pictures", place="all the same"))) == 5
    (tmp_path / "out/more.jpg").write_bytes((tree / "A/w1.jpg").read_bytes())
    assert list(findings(predicted(f"{tmp_path}/out/**/*.jpg", place="pattern"))) == ["more.jpg"]


@pytest.mark.parametrize("error", [Interrupted(signal.SIGTERM), OSError(24, "Too many open files")])
def test_what_was_done_before_it_ended_is_kept(configured, guessing, tree, tmp_path, monkeypatch, error):
    whole = predict.pictures

    def until(*args):
        for n, picture in enumerate(whole(*args)):
            if n == 2:
                raise error
            yield picture

    monkeypatch.setattr(predict, "pictures", until)
    (tree / "A/zero.jpg").write_bytes(b"")
    cfg = configured("task=predict", f"checkpoint={guessing()}", f"predict.source={tree}", "predict.threshold=0.3",
                     "predict.save=[pictures,json,csv,voc]")
    with pytest.raises(type(error), match=str(error).replace("[", ".")), RunRecord(tmp_path / "run", asdict(cfg)) as record:
        predict.run(cfg, record)
    assert list(findings(record.dir)) == ["A/w1.jpg", "B/w1.jpg"] and record.summary["pictures"] == 2
    assert len(list((record.dir / "voc").rglob("*.xml"))) == len(list((record.dir / "pictures").rglob("*.jpg"))) == 2
    assert "zero.jpg" in (record.dir / predict.UNREAD).read_text()
    assert "2 of 4 pictures are done" in (record.dir / "run.log").read_text() and not list(record.dir.glob(".*"))


def test_a_drawing_that_cannot_be_written_at_the_end_loses_no_results(configured, guessing, tree, tmp_path, monkeypatch):
    draw = predict._draw

    def full(file, *args):
        if file.name == "ü.jpg":
            raise OSError(28, "No space left on device", str(file))
        draw(file, *args)

    monkeypatch.setattr(predict, "_draw", full)
    (tree / "A/zero.jpg").write_bytes(b"")
    cfg = configured("task=predict", f"checkpoint={guessing()}", f"predict.source={tree}", "predict.threshold=0.3")
    with pytest.raises(TrainingError, match="cannot be written"), RunRecord(tmp_path / "run", asdict(cfg)) as record:
        predict.run(cfg, record)
    assert len(findings(record.dir)) == 4 and (record.dir / "predictions.csv").exists()


def test_unreadable_pictures_are_listed_and_the_others_done(predicted, tree):
    whole = (tree / "A/w1.jpg").read_bytes()
    (tree / "zero.jpg").write_bytes(b"")
    (tree / "cut.jpg").write_bytes(whole[: len(whole) // 2] + whole[-2:])  # seen only when it is decoded
    (tree / "gone.jpg").symlink_to(tree / "nowhere.jpg")
    folder = predicted(tree, raises="3 of 7 pictures could not be inspected")
    with open(folder / predict.UNREAD) as file:
        assert {row["image"]: row["what"] for row in csv.DictReader(file)} == {
            "cut.jpg": "is cut off: its lower part is missing", "gone.jpg": "no such picture", "zero.jpg": "is empty (0 bytes)"}
    assert "bad_images" not in (folder / predict.UNREAD).read_text()
    assert list(findings(folder)) == ["A/w1.jpg", "B/w1.jpg", "B/w1.png", "c d/ü.jpg"]
    (tree / "only").mkdir()
    (tree / "only/zero.jpg").write_bytes(b"")
    predicted(tree / "only", place="none", raises="1 of 1 pictures")


def test_a_file_a_pattern_and_a_list_are_the_same_pictures(predicted, tree, tmp_path):
    whole = findings(predicted(tree))
    single = findings(predicted(tree / "A/w1.jpg", place="single"))
    assert list(single) == ["w1.jpg"] and np.allclose(single["w1.jpg"], whole["A/w1.jpg"], atol=1e-3)
    pattern = findings(predicted(f"{tree}/**/*.jpg", place="pattern"))
    same(pattern, {name: rows for name, rows in whole.items() if name.endswith(".jpg")})
    (tmp_path / "list.txt").write_text("in/A/w1.jpg\n\nin/B/w1.png\nin/A/w1.jpg\nin/note.txt\nin/lost.png\n")
    listed = findings(predicted(tmp_path / "list.txt", place="list", raises="2 of 4"))
    same(listed, {name: whole[name] for name in ("A/w1.jpg", "B/w1.png")})
    assert "is no picture by its name" in predicted.raised and "no such picture" in predicted.raised


@pytest.mark.parametrize(("source", "said"), [
    ("nowhere", "is not there"), ("in/*.bmp", "matches no picture"), ("in/empty", "holds no picture"),
    ("in/note.md", "is no picture, folder or list"), ("in/none.txt", "names no picture"), ("in/note.txt", "names no picture")])
def test_a_source_that_names_nothing_is_refused(predicted, tree, tmp_path, source, said):
    (tree / "note.md").write_text("hello")
    (tree / "none.txt").write_text("\n")
    predicted(tmp_path / source, raises=said)


def test_batches_tiles_and_loaders_change_no_box(predicted, tree):
    big = np.random.default_rng(0).integers(0, 255, (150, 100, 3)).astype(np.uint8)
    cv2.imwrite(str(tree / "A/a.png"), big)  # of another size, amid the others
    whole = findings(predicted(tree))
    for k, more in enumerate((["predict.batch_size=1"], ["predict.batch_size=3", "loader.num_workers=0"], ["predict.tiles=150"],
                              ["predict.tiles=none", "loader.workers=process", "loader.num_workers=1"])):
        same(whole, findings(predicted(tree, *more, place=f"again{k}")))


def test_predictions_are_what_evaluation_finds_from_the_threshold_on(predicted, guessing, welds, configured, cache):
    model = guessing()
    found = findings(predicted(welds / "images", model=model))
    cfg, device = configured(), choose_device("cpu")
    index = open_index(cfg.dataset, cache)
    trained = Trained.load(model, device)
    dataset = DetectionDataset(index, "val", trained.classes, trained.cfg)
    judged = evaluate(trained.model, evaluation_loader(dataset, LoaderConfig(), 2, device), trained.classes, cfg.evaluate, device,
                      trained.dtype)
    for at, row in enumerate(dataset.pictures):
        own = (judged.found.image == at) & (judged.found.scores >= 0.3)
        boxes = judged.found.boxes[own]
        rows = np.c_[boxes[:, :2], boxes[:, 2:] - boxes[:, :2], judged.found.labels[own], judged.found.scores[own]]
        assert np.allclose(np.array(sorted(map(tuple, rows))).reshape(-1, 6), found[Path(index.path(row)).name], atol=2e-3)


def test_large_pictures_are_cut_where_the_model_would_see_them_too_small(guessing, configured, plates_of):
    index = plates_of((128, 128), (128, 300), (300, 2000))
    trained = Trained.load(guessing("model.min_size=128", "model.max_size=256"), choose_device("cpu"))
    cut, cfg = trained.samples(index, "auto")
    assert cfg.tiles is None and [len(cut.siblings(int(np.flatnonzero(cut.shown(np.arange(len(cut))) == k)[0])))
                                  for k in range(3)] == [1, 1, 3 * 20]
    assert (cut.sizes[2:] == 128).all()  # at the scale that was trained at
    for asked, windows in (("none", 3), ("model", 3), (1000, 2 + 3)):
        assert len(trained.samples(index, asked)[0]) == windows
    trained.trained_px = None
    assert trained.samples(index, "auto")[0] is index


def test_thresholds_are_the_checkpoints_unless_given(predicted, guessing, tree, configured, tmp_path):
    points = {name: {"threshold": 0.2 + 0.1 * k, "why": ""} for k, name in enumerate(CLASSES)}
    model = guessing(metrics={"operating_points": {"rule": {}, "split": "val", "points": points}})
    folder = predicted(tree, "predict.threshold=null", model=model)
    rows = np.concatenate(list(findings(folder).values()))
    assert len(rows) and (rows[:, 5] >= 0.2 + 0.1 * (rows[:, 4] - 1) - 1e-9).all()
    assert predicted.summary["thresholds"] == {name: point["threshold"] for name, point in points.items()}
    predicted(tree, "predict.threshold=null", model=guessing(), place="none")
    assert predicted.summary["thresholds"] == dict.fromkeys(CLASSES, 0.5)
    assert "holds no thresholds" in (tmp_path / "none/run.log").read_text()


@pytest.mark.parametrize(("override", "said"), [
    ("predict.tiles=100", "chosen in whole pictures, and here tiles of 100 px"), ("predict.max_detections=7", "chosen with 100"),
    ("predict.tiles=auto", "")])
def test_a_promise_is_of_pictures_looked_at_as_those_were_that_chose(predicted, guessing, tree, tmp_path, override, said):
    points = {"rule": {}, "split": "val", "points": {name: {"threshold": 0.3, "why": ""} for name in CLASSES},
              "seen_in": {"tile_px": None, "max_detections": 100, "score_thresh": 0.01}}
    predicted(tree, "predict.threshold=null", override, model=guessing(metrics={"operating_points": points}))
    told = (tmp_path / "run/run.log").read_text()
    assert ("promise does not hold" in told) == bool(said) and said in told


def test_what_is_missing_is_asked_for(configured):
    with pytest.raises(ConfigError, match="checkpoint"):
        configured("task=predict", "predict.source=x")
    with pytest.raises(ConfigError, match=r"predict\.source"):
        configured("task=predict", "checkpoint=x.pt")
    with pytest.raises(ConfigError, match=r"predict\.save"):
        configured("predict.save=[]")


@pytest.fixture
def plates_of(tmp_path, cache):
    """An index of empty pictures of these sizes, height and width."""
    def make(*sizes):
        root = tmp_path / "plates"
        root.mkdir()
        for k, size in enumerate(sizes):
            cv2.imwrite(str(root / f"{k}.png"), np.zeros(size, np.uint8))
        lines = (f"{k}.png,1,1,9,9,crack\n" for k in range(len(sizes)))
        (root / "boxes.csv").write_text("image,x1,y1,x2,y2,class\n" + "".join(lines))
        return open_index(replace(DatasetConfig(), format="csv", root=str(root)), cache)

    return make
