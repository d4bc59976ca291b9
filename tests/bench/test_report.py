"""The comparison of runs: read from their folders, as a table, and as a page that stands alone."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import yaml

from lab.bench.files import RunLog
from lab.errors import UserError
from lab.report.comparison import Report, same_tokens, write_report
from lab.report.rows import Row, read_rows
from lab.report.svg import WIDTH, bars, distributions, short_number


def line(id, tokens, *, index=0, prompt_tokens=5, ttft_ms=10.0, error=None, finish_reason="length"):
    times = {"ttft_ms": ttft_ms, "itl_ms": [2.0] * (len(tokens) - 1), "tpot_ms": 2.0}
    ended = {"finish_reason": finish_reason, "error": error}
    return {"id": id, "index": index, "prompt_tokens": prompt_tokens, "output_token_ids": tokens, **ended, **times}


def a_run(folder, lines, config=None, **metrics):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"seed": 0}))
    (folder / "log.txt").touch()
    (folder / "metrics.json").write_text(json.dumps({"output_tok_per_s": 100.0, **metrics}))
    (folder / "requests.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def a_sweep(folder, points):
    """`points`: (params, status, reason, lines) of each; a failed one has left nothing behind."""
    rows = []
    for number, (params, status, reason, lines) in enumerate(points, 1):
        name = f"{number}_point"
        if status == "ok":
            a_run(folder / name, lines, output_tok_per_s=50.0 * number, roofline={"floor_ratio": 1.5 * number, "quiet": True})
        else:
            (folder / name).mkdir(parents=True)
        rows.append({"point": number, **params, "status": status, "reason": reason, "folder": name})
    (folder / "sweep.json").write_text(json.dumps({"swept": ["+attention", "seed"], "points": rows}))
    return folder


SAME = [line("a", [1, 2, 3]), line("b", [4, 5])]


def test_the_points_of_a_sweep_are_compared_over_what_was_varied(tmp_path):
    folder = a_sweep(
        tmp_path / "sweep",
        [
            ({"attention": "eager", "seed": "1"}, "ok", "", SAME),
            ({"attention": "<mine>", "seed": "1"}, "ok", "", [line("a", [1, 2, 9]), line("b", [4, 5])]),
            ({"attention": "lost", "seed": "1"}, "failed", "no plugin | named\n'lost'", []),
        ],
    )
    page = write_report(folder, "mine & yours", read_rows([folder]))
    table = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", text)[1:-1]]
        for text in (folder / "report.md").read_text().splitlines()[4:9]
    ]
    assert table[0] == ["run", "attention", "status", "out tok/s", "step / floor", "tokens", "reason"]
    assert table[2] == ["1", "eager", "ok", "50", "1.5", "reference", ""]
    assert table[3] == ["2", "<mine>", "ok", "100", "3", "1 of 2 differ, the first at token 3", ""]
    assert table[4] == ["3", "lost", "failed", "", "", "", "no plugin \\| named 'lost'"]
    html = page.read_text()
    assert "<h1>mine &amp; yours</h1>" in html and "&lt;mine&gt;" in html and "<mine>" not in html
    assert 'href="2_point/"' in html and '<tr class="failed">' in html
    plots = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    titles = [plot.find("{http://www.w3.org/2000/svg}title").text.split(",")[0] for plot in plots]
    assert titles == ["output tokens per second", "decode step over its floor: 1 is the machine's limit", "TTFT", "ITL", "TPOT"]
    assert not re.search(r"<script|<img|<link|src=|url\(", html)  # nothing is fetched
    assert not list(folder.glob(".*"))


def test_runs_of_a_busy_machine_are_marked(tmp_path):
    folders = [
        a_run(tmp_path / str(seed), SAME, {"seed": seed}, others_cpu_share=share)
        for seed, share in ((1, 0.02), (2, 0.31), (3, 0.4))
    ]
    report = Report("mine", read_rows(folders), tmp_path)
    lines = report.markdown().splitlines()
    place = [cell.strip() for cell in lines[2].split("|")].index("CPU of others")
    assert [line.split("|")[place].strip() for line in lines[4:7]] == ["", "31%", "40%"]
    assert "while run 2, 3 ran: its times and rates say little." in lines[-1]
    assert report.html().count('<tr class="busy">') == 2
    quiet = Report("mine", read_rows(folders[:1]), tmp_path)
    assert "CPU of others" not in quiet.markdown() and "busy" not in re.sub("<style>.*</style>", "", quiet.html(), flags=re.S)


def test_runs_are_told_apart_by_their_settings(tmp_path):
    folders = [
        a_run(tmp_path / name, SAME, {"attention": {"name": name, "isa": isa}, "seed": 1, "tracking": {"x": name}})
        for name, isa in (("eager", None), ("flash", "avx2"))
    ]
    rows = read_rows(folders)
    assert [row.params for row in rows] == [
        {"attention": "eager", "attention.isa": "None"},
        {"attention": "flash", "attention.isa": "avx2"},
    ]
    (alone,) = read_rows(folders[:1])
    assert alone.params == {} and alone.label == "eager"


def test_what_ran_is_said_above_the_table(tmp_path):
    env = {"model": "tiny", "dtype": "bfloat16", "kv_dtype": "bfloat16", "cpu": "Box <9>", "usable_cores": 2, "threads": 1}
    env |= {"lab": "0.1", "torch": "2.13", "python": "3.11", "git": {"commit": "0123456789abcdef", "dirty": True}}
    folders = [a_run(tmp_path / name, SAME, num_requests=1200) for name in ("one", "two", "old")]
    for folder, kv_dtype in zip(folders, ("bfloat16", "int8"), strict=False):
        (folder / "env.json").write_text(json.dumps(env | {"kv_dtype": kv_dtype}))
        (folder / "resolved.json").write_text('{"workload": {"name": "random"}}')
    report = Report("t", read_rows(folders), tmp_path)
    assert report.markdown().splitlines()[2:6] == [
        "- model: tiny, bfloat16 (run 1); tiny, bfloat16, KV cache int8 (run 2)",
        "- workload: random, 1,200 requests",
        "- machine: Box <9>, 2 cores, 1 thread",
        "- code: lab 0.1, commit 0123456789ab with changes, torch 2.13, python 3.11",
    ]
    assert "<li>machine: Box &lt;9&gt;, 2 cores, 1 thread</li>" in report.html()


def test_what_all_runs_have_alike_is_said_once(tmp_path):
    rows = [Row(tmp_path / name, {"spec": name, "a.b": "<7>"}, metrics={"output_tok_per_s": 1.0}) for name in ("none", "ngram")]
    report = Report("t", rows, tmp_path)
    text, page = report.markdown(), report.html()
    assert text.splitlines()[2] == "All runs: a.b=<7>." and "<p>All runs: a.b=&lt;7&gt;.</p>" in page
    assert "| run | spec  | status" in text and "<th>a.b</th>" not in page
    alone = Report("t", rows[:1], tmp_path).markdown()
    assert "All runs" not in alone and "a.b" in alone


def test_what_a_killed_run_left_behind_is_read(tmp_path):
    folder = a_run(tmp_path / "run", SAME)
    (folder / "metrics.json").unlink()
    with (folder / "requests.jsonl").open("a") as file:
        file.write('{"id": "c", "ind')
    (row,) = read_rows([folder])
    assert row.status == "unfinished" and len(row.outputs) == 2 and list(row.samples["ttft_ms"]) == [10.0, 10.0]
    assert "it did not end" in Report("t", [row], tmp_path).markdown()


def test_a_run_that_was_refused_says_why(tmp_path):
    folder = a_run(tmp_path / "run", SAME)
    (folder / "metrics.json").unlink()
    with pytest.raises(UserError), RunLog(folder):
        raise UserError("workload: cannot read nofile.jsonl: No such file or directory.")
    (row,) = read_rows([folder])
    assert (row.status, row.reason) == ("failed", "workload: cannot read nofile.jsonl: No such file or directory.")


def test_a_folder_of_nothing_is_named(tmp_path):
    with pytest.raises(UserError, match="is the folder of no run and no sweep"):
        read_rows([tmp_path])
    (tmp_path / "config.yaml").touch()  # somebody else's, as that of conf/
    with pytest.raises(UserError, match="is the folder of no run and no sweep"):
        read_rows([tmp_path])


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (SAME, "same"),
        ([line("a", [1, 2, 3]), line("b", [4, 6])], "1 of 2 differ, the first at token 2"),
        ([line("a", [1, 2]), line("b", [9, 5])], "2 of 2 differ, the first at token 1"),
        ([line("a", [1, 2]), line("b", [4, 5])], "1 of 2 differ, the first at token 3"),
        ([line("a", [1, 2, 3])], "same; 1 in one of the two only"),
        ([line("a", [1, 2, 3]), line("b", [4, 5], prompt_tokens=6)], "other requests"),
        ([line("x", [1, 2, 3])], "other requests"),
        ([line("a", [], error="too long")], ""),
    ],
)
def test_tokens_are_compared_request_by_request(tmp_path, lines, told):
    rows = read_rows([a_run(tmp_path / "1", SAME), a_run(tmp_path / "2", lines)])
    assert same_tokens([Row(tmp_path), *rows]) == ["", "reference", told]


def test_samples_of_one_request_are_compared_each_with_its_own(tmp_path):
    first = [line("a", [1], index=0), line("a", [2], index=1)]
    rows = read_rows([a_run(tmp_path / "1", first), a_run(tmp_path / "2", first[::-1])])
    assert same_tokens(rows) == ["reference", "same"]


def test_bars_are_as_long_as_their_values():
    plot = ElementTree.fromstring(bars("speed <here>", [("a", 10.0), ("b", 5.0), ("c", 0.0)]))
    widths = [float(bar.get("width")) for bar in plot.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths == pytest.approx([widths[0], widths[0] / 2, 0.0]) and 0 < widths[0] < WIDTH
    ElementTree.fromstring(bars("nothing", [("a", 0.0)]))


@pytest.mark.parametrize("values", [[3.0], [1.0, 1.0], [0.0, 2.0], [0.02, 0.5, 900.0], list(range(1, 1000)), [1e-3, 1e6]])
def test_lines_stay_inside_and_rise(values):
    plot = ElementTree.fromstring(distributions("times", [("a", values), ("none", []), ("b", [v * 1.5 for v in values])]))
    lines = list(plot.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 2
    for points in lines:
        xs, ys = zip(*(map(float, pair.split(",")) for pair in points.get("points").split()), strict=True)
        assert 50 <= min(xs) <= max(xs) <= WIDTH - 30 and list(xs) == sorted(xs)
        assert list(ys) == sorted(ys, reverse=True) and ys[0] - ys[-1] == pytest.approx(240, abs=0.2)
    middle = {x.get("points") for x in lines}
    assert len(middle) == 2


def test_numbers_are_short():
    assert [short_number(x) for x in (0, 0.01234, 1.5, 12.34, 99.96, 1234.5)] == ["0", "0.0123", "1.5", "12.3", "100", "1,234"]


def test_a_run_that_was_interrupted_says_so_and_what_was_cut_is_not_compared(tmp_path):
    whole = a_run(tmp_path / "whole", SAME)
    lines = [SAME[0], line("b", [4], finish_reason="abort")]
    cut = a_run(tmp_path / "cut", lines, {"seed": 1}, interrupted=True, num_unfinished=1)
    rows = read_rows([whole, cut])
    assert [row.status for row in rows] == ["ok", "interrupted"] and rows[1].reason == "requests that had not ended: 1"
    assert same_tokens(rows) == ["reference", "same; 1 in one of the two only"]
