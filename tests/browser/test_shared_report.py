"""A report: one file that shows a run without a server and without any request."""

from pathlib import Path

import numpy as np
import pytest
import torch
from view_helpers import fake_run, make_step, metrics_row, recorded, replace_text, with_maps

from mtrl.commands import report
from mtrl.types import AttentionMap
from mtrl.utils.errors import StartError
from mtrl.utils.metric_glossary import describe_metric
from mtrl.view import shared_view as share

expect = pytest.importorskip("playwright.sync_api", reason="pip install playwright, which drives the browser").expect
HARM = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>"


def test_a_report_opens_by_itself(page, tmp_path, capsys):
    run = fake_run(tmp_path / "run", steps=4)
    assert report.run([str(run)]) == 0
    html, table, picture = map(Path, capsys.readouterr().out.split())
    assert picture.name == "curves.png" and "| reward/overall | 0.1 | 0.4 | 0.4 | 4 |" in table.read_text()
    assert str(tmp_path) not in html.read_text(), "a report names no path of the machine"
    page.goto(f"file://{html}")
    page.wait_for_selector("canvas")
    assert describe_metric("reward/overall") in page.locator(".chart .title").first.get_attribute("title")
    page.keyboard.press("r")
    page.wait_for_selector(".response .token")
    expect(page.locator(".sample header h2")).to_contain_text("Step 4")
    assert page.locator(".images img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 4
    page.keyboard.press("5")
    page.wait_for_selector(".token.on")
    page.keyboard.press("[")
    expect(page.locator(".sample header h2")).to_contain_text("Step 3")
    page.keyboard.press("g")
    page.wait_for_selector(".member")
    page.keyboard.press("i")
    expect(page.locator("table").first).to_contain_text("update")


def test_a_report_has_attention_maps_up_to_a_bound(page, tmp_path, monkeypatch):
    """There is room for one of the two responses to a prompt: the first of its group."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(metrics_row(1, **{"reward/overall": 1.0}))
    looks = AttentionMap(torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8), torch.tensor([0.5, 0.25]))
    step = with_maps(make_step(), [looks, looks, None], (np.full((28, 56, 3), 90, np.uint8),))
    recorded(run / "record", step)
    monkeypatch.setattr(share, "MAPS_BYTES", 30)
    report.run([str(run), "--out", str(tmp_path / "shared")])
    page.goto(f"file://{tmp_path / 'shared' / 'report.html'}#rollouts")
    tokens, looks = page.locator(".response .token"), page.locator(".images canvas.attention-map")
    tokens.first.hover()
    looks.wait_for()
    expect(page.locator(".images figcaption").first).to_have_text("50% of its attention")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".sample header h2")).to_contain_text("response 2 of 2")
    tokens.first.hover()
    page.locator(".token-tip", has_text="vision mass").wait_for()
    expect(looks).to_have_count(0)


def test_a_report_of_texts_that_mean_harm(page, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(metrics_row(1, **{f"{HARM}/x": 1.0, "reward/overall": 1.0}))
    (run / "config.yaml").write_text(HARM)
    recorded(run / "record", replace_text(make_step(), HARM, prompt=HARM, name=HARM))
    report.run([str(run), "--out", str(tmp_path / "shared")])
    page.goto(f"file://{tmp_path / 'shared' / 'report.html'}#rollouts")
    page.wait_for_selector(".list .head")
    assert page.locator(".list .head").first.inner_text().startswith("</script><script>")
    assert page.locator("main script").count() == 0


def test_arguments(tmp_path):
    for wrong, why in (
        ([], "which run"),
        (["x", "--outt"], "no option"),
        (["x", "--rollouts", "many"], "no whole number"),
        ([str(tmp_path / "no")], "no such"),
    ):
        with pytest.raises(StartError, match=why):
            report.run(wrong)
