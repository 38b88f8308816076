"""The viewer in real Chromium: a run of the demo, live runs, filters, comparison, damage, and texts that mean harm."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import fake_turn, with_turns
from view_helpers import fake_run, make_step, metrics_row, recorded, replace_text, served, with_maps

from mtrl.commands import demo
from mtrl.embedded.embedded_rows import SIZES
from mtrl.types import AttentionMap
from mtrl.utils.metric_glossary import describe_metric

pytest.importorskip("uvicorn", reason="pip install 'mtrl[view]'")
expect = pytest.importorskip("playwright.sync_api", reason="pip install playwright, which drives the browser").expect


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """A run made by the demo, two steps of it, with every heat map: token weights read attention."""
    output = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "validation", 8)
        demo.run([
            "training.max_steps=2", "training.record_attention_maps=true", "training.val_freq=-1",
            "training.logger=[]", "training.experiment_name=demo",
            f"training.output_dir={output}", "dataset.rollout_batch_size=2", "worker.rollout.n=4",
            "worker.actor.global_batch_size=2",
            "optimization.enable_token_weights=true", "optimization.compute_attention_metrics=true",
        ])  # fmt: skip
    return output / "mtrl" / "demo"


def titles(page):
    return page.locator(".sample header h2").inner_text()


def test_a_run_of_the_demo(page, demo_run):
    with served(demo_run) as address:
        page.goto(address)
        page.wait_for_selector("canvas")
        assert page.locator(".chart .title", has_text="reward/overall").first.is_visible()
        page.locator(".chart canvas").first.hover()
        assert re.match(r"step \d", page.locator(".chart-tip:visible").inner_text())
        page.keyboard.press("r")
        page.wait_for_selector(".list li")
        assert page.locator(".list li").count() == 8
        assert "Step 2" in titles(page)
        images = page.locator(".images img")
        assert images.count() == 2
        assert images.nth(1).evaluate("image => image.decode().then(() => image.naturalWidth)") == 56
        page.locator(".response .token").first.hover()
        message = page.locator(".token-tip").inner_text()
        for name in ("S", "entropy", "weight", "trained on", "advantage", "log-prob", "vision mass, late"):
            assert name in message
        # keys move through the samples, and to the step before
        before = titles(page)
        page.keyboard.press("ArrowRight")
        expect(page.locator(".sample header h2")).not_to_have_text(before)
        assert page.locator(".list li[aria-selected=true]").get_attribute("data-key") == "2 1"
        page.keyboard.press("[")
        expect(page.locator(".sample header h2")).to_contain_text("Step 1")
        assert "from=1" in page.url, "the URL contains it"


def test_a_kept_token_without_an_advantage_is_not_trained_on(page, tmp_path):
    step, run = make_step(), fake_run(tmp_path / "run", steps=1)
    shutil.rmtree(run / "record")
    recorded(run / "record", replace(step, credit=replace(step.credit, advantage=torch.zeros(3, 2))))
    with served(run) as address:
        page.goto(f"{address}#rollouts?heat=mask")
        page.wait_for_selector(".response .token.on")
        assert "trained on\n0 tokens" in page.locator(".sample").inner_text()
        page.locator(".response .token").first.hover()
        message = page.locator(".token-tip").inner_text()
        assert "kept\nyes" in message and "trained on\nno" in message
        assert "not kept" in page.locator(".sample").inner_text(), "the legend of the mask says what it shows"


def test_every_heat_map_shows_its_own_numbers(page, demo_run):
    with served(demo_run) as address:
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".response .token")
        seen = {}
        for number, name in enumerate(("dependency", "entropy", "vision", "weight", "mask", "advantage"), 1):
            page.keyboard.press(str(number))
            page.wait_for_selector(f'.pill[data-heat={name}][aria-pressed="true"]')
            seen[name] = page.eval_on_selector_all(
                ".response .token", "tokens => tokens.map(t => t.style.background + t.className)"
            )
        assert len({tuple(look) for look in seen.values()}) == 6, "six maps, six pictures"
        assert any("on" in look for look in seen["mask"]) and any("off" in look for look in seen["mask"])
        page.keyboard.press("3")
        page.select_option(".heat-bar select", "early")
        expect(page).to_have_url(re.compile("segment=early"))
        early = page.eval_on_selector_all(
            ".response .token", "tokens => tokens.map(t => t.style.background + t.className)"
        )
        assert early != seen["vision"], "layers differ"
        rows = page.locator(".matrix .row button").all_inner_texts()
        assert rows[:2] == ["S", "entropy"] and "vision, late" in rows and "mask" in rows


def test_messages_of_an_environment_are_at_their_place(page, tmp_path):
    shown = fake_turn(1, "<b>bold</b>", np.zeros((9, 7, 3), dtype=np.uint8), tools=("zoom", ""), errors=1, waited=0.25)
    run = fake_run(tmp_path / "run", steps=1)
    shutil.rmtree(run / "record")
    recorded(run / "record", with_turns(make_step(), [shown], None, [fake_turn(2, "the end")]))
    with served(run) as address:
        page.goto(f"{address}#rollouts?step=1&row=0")
        page.wait_for_selector(".response .token")
        parts = page.locator(".response > *").evaluate_all("nodes => nodes.map(node => node.className.trim())")
        assert parts == ["token", "message", "token"]
        message = page.locator(".response .message")
        for text in ("zoom", "unreadable call", "1 failed", "7 tokens", "250 ms", "<b>bold</b><image>"):
            assert text in message.inner_text()
        assert message.locator("img").evaluate("img => img.decode().then(() => img.naturalHeight)") == 9
        assert page.locator(".images img").count() == 2, "those of the prompt and its perturbed view"
        assert page.locator(".strip > *").evaluate_all("nodes => nodes.map(node => node.className)") == [
            "bar", "between", "bar",
        ]  # fmt: skip
        assert "tool calls\n2\nfailed calls\n1\ntokens shown\n7" in page.locator(".facts").inner_text()
        page.locator(".response .token").last.hover()
        assert "token 2 of 2" in page.locator(".token-tip").inner_text(), "messages are no tokens of the response"
        message.hover()
        assert page.locator(".token-tip").is_hidden()
        page.keyboard.press("g")
        page.wait_for_selector(".member .message")
        assert page.locator(".member").nth(1).locator(".message").count() == 0
        page.keyboard.press("g")
        page.locator(".list li[data-key='1 2']").click()
        expect(page.locator(".response > .message:last-child")).to_contain_text("the end")
        assert "tool calls\n0\ntokens shown\n3" in page.locator(".facts").inner_text()


DRAWN = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].join()"


def test_a_signal_of_the_user_is_a_heat_map(page, tmp_path):
    step = make_step()
    values = torch.arange(step.rollouts.mask.numel()).view(step.rollouts.mask.shape) - 2.0
    run = fake_run(tmp_path / "run", steps=1)
    shutil.rmtree(run / "record")
    recorded(run / "record", replace(step, signals=replace(step.signals, extra={"margin": values})))
    with served(run) as address:
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".response .token")
        page.locator('.pill[data-heat="extra_margin"]').click()
        page.wait_for_selector('.pill[data-heat="extra_margin"][aria-pressed="true"]')
        assert "margin" in page.locator(".matrix .row button").all_inner_texts()
        page.locator(".response .token").first.hover()
        assert "margin" in page.locator(".token-tip").inner_text()


def test_signals_of_published_rules_are_heat_maps(page, tmp_path):
    """Log-probs of a view (pgpo), shifts of attention (dyco) and similarities (vgpo), in amounts or around 0."""
    step = make_step()
    values = torch.linspace(0.1, 0.9, step.rollouts.mask.numel()).view(step.rollouts.mask.shape)
    extra = {"logprobs@none": -values}
    signals = replace(step.signals, image_shift=values, token_similarity=values - 0.5, extra=extra)
    labels = {"logprobs@none": "log-prob, view none", "image_shift": "image shift", "token_similarity": "similarity"}
    run = fake_run(tmp_path / "run", steps=1)
    shutil.rmtree(run / "record")
    recorded(run / "record", replace(step, signals=signals))
    with served(run) as address:
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".response .token")
        for signal, label in labels.items():
            page.get_by_role("button", name=label, exact=True).first.click()
            page.wait_for_selector(f'.pill[data-heat="extra_{signal}"][aria-pressed="true"]')
            looks = page.eval_on_selector_all(".response .token", "tokens => tokens.map(t => t.style.background)")
            assert len(set(looks)) == len(looks) == 2 and all(looks), f"{label}: {looks}"
            page.locator(".response .token").first.hover()
            assert label in page.locator(".token-tip").inner_text()


def wait_for_images(page):
    """What is below them moves until they are there."""
    page.wait_for_selector(".images img")
    page.locator(".images img").evaluate_all("images => Promise.all(images.map(image => image.decode()))")


def test_the_attention_map_of_a_token(page, demo_run):
    with served(demo_run) as address:
        page.goto(f"{address}#rollouts")
        wait_for_images(page)
        tokens, looks = page.locator(".response .token"), page.locator(".images canvas.attention-map")
        tokens.nth(1).hover()
        looks.wait_for()
        assert looks.evaluate("canvas => [canvas.width, canvas.height]") == [2, 2] and looks.count() == 1
        over, picture = looks.bounding_box(), page.locator(".images img").first.bounding_box()
        assert all(abs(over[side] - picture[side]) <= 2 for side in over), "it lies on the image"
        first, replace_text = looks.evaluate(DRAWN), page.locator(".images figcaption").first.inner_text()
        assert re.search(r"\d% of its attention", replace_text)
        tokens.nth(4).hover()
        assert looks.evaluate(DRAWN) != first, "another token, another map"
        page.locator(".question").hover()
        assert looks.is_hidden() and page.locator(".images figcaption").first.inner_text() == "as the model saw it"
        # the keyboard does the same, without moving to another response
        tokens.first.focus()
        before = titles(page)
        page.keyboard.press("ArrowRight")
        assert looks.is_visible() and looks.evaluate(DRAWN) == first and titles(page) == before
        page.keyboard.press("Escape")
        assert looks.is_hidden()
        page.keyboard.press("g")
        page.wait_for_selector(".member")
        page.locator(".member .token").nth(1).hover()
        looks.wait_for()


def test_each_image_has_its_own_map(page, tmp_path):
    """Two images: the first token attends to the second, and vice versa. Scrolled down, they are in the tooltip."""
    maps = [AttentionMap(torch.tensor([[0, 0, 255], [255, 51, 0]], dtype=torch.uint8), torch.tensor([0.5, 0.25]))]
    media = (np.full((28, 56, 3), 90, np.uint8), np.full((28, 28, 3), 160, np.uint8))
    recorded(tmp_path / "run/record", with_maps(make_step(), [*maps, None, None], media))
    with served(tmp_path / "run") as address:
        asked = []
        page.route("**/maps*", lambda route: asked.append(route))
        page.goto(f"{address}#rollouts")
        wait_for_images(page)
        tokens, looks = page.locator(".response .token"), page.locator(".images canvas.attention-map")
        tokens.nth(1).hover()
        tokens.first.hover()  # while the maps are on their way
        asked[0].continue_()
        expect(looks).to_have_count(2)
        drawn = [
            [round(1 - int(each) / 255, 2) for each in look.evaluate(DRAWN).split(",")[3::4]] for look in looks.all()
        ]
        assert drawn == [[0.25, 0.25], [1.0]], "veiled, and not"
        replace_text = page.locator(".images figcaption").all_inner_texts()
        assert (replace_text[0], replace_text[2]) == ("0% of its attention", "50% of its attention")
        tokens.nth(1).hover()
        expect(page.locator(".images figcaption").first).to_have_text("26% of its attention")
        page.set_viewport_size({"width": 1280, "height": 300})
        tokens.first.focus()
        page.locator(".sample").evaluate("node => (node.scrollTop = 1000)")
        tokens.nth(1).hover()
        expect(page.locator(".token-tip canvas.attention-map")).to_have_count(2)


def test_the_page_of_another_machine_has_a_token(page, tmp_path):
    with served(fake_run(tmp_path / "run"), token="secret") as address:
        page.goto(f"{address}#rollouts")
        expect(page.locator(".sample header h2")).to_contain_text("Step 3")
        assert page.locator(".images img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 4
        page.reload()
        expect(page.locator(".sample header h2")).to_contain_text("Step 3")


def test_a_group(page, demo_run):
    with served(demo_run) as address:
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".response .token")
        page.keyboard.press("g")
        page.wait_for_selector(".member")
        rewards = [float(text) for text in page.locator(".member .reward").all_inner_texts()]
        assert len(rewards) == 4 and rewards == sorted(rewards, reverse=True)
        page.locator(".member button").nth(3).click()
        page.wait_for_selector(".matrix")


def test_phases_memory_and_configuration(page, demo_run):
    with served(demo_run) as address:
        page.goto(f"{address}#run")
        page.wait_for_selector("table tbody tr")
        phases = page.locator("table tbody td:first-child").all_inner_texts()
        assert {"generate", "probe", "update", "whole step"} <= set(phases)
        page.get_by_text("configuration").click()
        assert "rollout_batch_size" in page.locator(".config").inner_text()


def test_the_pointer_explains_a_metric(page, demo_run):
    def helps(selector, **options):
        return page.locator(selector, **options).first.get_attribute("title") or ""

    with served(demo_run) as address:
        page.goto(address)
        page.wait_for_selector("canvas")
        assert helps(".chart .title", has_text="actor/entropy") == f"actor/entropy\n{describe_metric('actor/entropy')}"
        unexplained = ".chart .title:not([title*='\\a '])"  # a line break
        assert page.locator(unexplained).count() == 0 < page.locator(".chart .title").count()
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".parts dt")
        assert helps(".parts dt", has_text="accuracy") == describe_metric("reward/accuracy")
        page.goto(f"{address}#run")
        page.wait_for_selector("table tbody tr")
        assert helps("table td", has_text="update") == describe_metric("perf/seconds_update")


def test_it_follows_a_running_run(page, tmp_path):
    """The page polls every two seconds; the test advances its clock."""
    run = fake_run(tmp_path / "run", steps=2)

    def pulse():
        with page.expect_response("**/api/runs*"):
            page.clock.run_for(2500)

    with served(run) as address:
        page.clock.install()
        page.goto(f"{address}#rollouts")
        expect(page.locator(".sample header h2")).to_contain_text("Step 2")
        assert "live" in page.locator(".badge").inner_text()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(metrics_row(3, **{"reward/overall": 0.9, "new/metric": 1.0}))
        more = recorded(
            tmp_path / "more", make_step(), make_step(), replace_text(make_step(shades=(7, 8)), "the newest")
        )
        part = more._blocks[3].part.read_bytes()
        with (run / "record/part-00001.bin").open("ab") as file:
            file.write(part[more._blocks[3].start :][:-30])
            file.flush()
            pulse()
            pulse()
            assert titles(page).startswith("Step 2"), "half of it is not shown"
            file.write(part[-30:])
        pulse()
        expect(page.locator(".sample header h2")).to_contain_text("Step 3")
        page.keyboard.press("c")
        page.wait_for_selector(".chart .title[title='new/metric']")


def test_sorting_filters_and_pages(page, tmp_path):
    run = fake_run(tmp_path / "run", steps=18)
    with served(run) as address:
        page.goto(f"{address}#rollouts?latest=false")
        page.wait_for_selector(".list li")
        assert "1–50 of 54 responses" in page.locator(".pager").inner_text()
        page.get_by_label("next page").click()
        expect(page.locator(".pager")).to_contain_text("51–54")
        page.select_option("select[aria-label='sort by']", "reward")
        page.get_by_label("reverse the order").click()
        expect(page.locator(".list .reward").first).to_have_text("1.5")
        page.get_by_text("filter", exact=False).first.click()
        page.get_by_label("max").first.fill("0.7")
        expect(page.locator(".pager")).to_contain_text("of 18 responses")
        assert set(page.locator(".list .reward").all_inner_texts()) == {"0.5"}
        page.get_by_label("min").nth(2).fill("9")
        page.get_by_text("No matching responses.").wait_for()


def test_two_runs_compared(page, tmp_path):
    with served(fake_run(tmp_path / "one"), fake_run(tmp_path / "two", steps=2)) as address:
        page.goto(address)
        page.wait_for_selector("canvas")
        page.locator(".chart canvas").first.hover(position={"x": 60, "y": 60})
        assert {"one", "two"} <= set(page.locator(".chart-tip:visible").inner_text().split())
        page.locator(".run", has_text="two").click()
        page.locator(".chart canvas").first.hover(position={"x": 62, "y": 60})
        assert "two" not in page.locator(".chart-tip:visible").inner_text()
        page.locator(".run", has_text="two").click()
        page.goto(f"{address}#rollouts?latest=false&from=1&to=1&view=group")
        page.wait_for_selector(".side-by-side section:nth-child(2) .member")
        assert [name.strip() for name in page.locator(".side-by-side h2").all_inner_texts()] == ["one", "two"]


def test_a_narrow_window_and_long_names(chromium, tmp_path, demo_run):
    """Nothing is wider than its place at 800 pixels, and the names of runs stay different where they are cut."""
    context = chromium.new_context(viewport={"width": 800, "height": 700})
    page = context.new_page()
    names = [f"qwen2_5_vl_3b_geometry_credit_seed_{k}_of_many" for k in range(3)]
    runs = [fake_run(tmp_path / name) for name in names]
    overflowing = """[...document.querySelectorAll("header, header *, .sample, .heat-bar, .side, .filters, main")]
        .filter(node => node.getBoundingClientRect().right > innerWidth + 1 || (node.scrollWidth > node.clientWidth + 1
                && node.clientWidth && getComputedStyle(node).textOverflow !== "ellipsis" && !node.closest("h2")))
        .map(node => node.className || node.tagName)"""
    with served(demo_run, *runs) as address:
        for tab in ("curves", "rollouts", "rollouts?view=group", "run"):
            page.goto(f"{address}#{tab}")
            page.wait_for_selector(".chart, .sample header")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            assert page.evaluate(overflowing) == [], tab
        shown = page.evaluate("""[...document.querySelectorAll(".run span")].map(span => {
            const all = span.textContent, part = span.clientWidth / span.scrollWidth;
            return all.slice(0, Math.floor(all.length * part) - (part < 1 ? 1 : 0));
        })""")
        assert len(set(shown)) == 4, shown
    context.close()


HARM = "<script>alert('x')</script><img src=x onerror=alert(1)>\x1b[31mred\x1b[0m \u202egnp.exe"


def test_texts_that_mean_harm_are_texts(page, tmp_path):
    name = "<b onmouseover=alert(3)>run"
    run = tmp_path / name
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        metrics_row(1, **{"<img src=x onerror=alert(2)>/loss": 1.0, "reward/overall": 1.0, f"reward/{HARM}": 1.0})
    )
    (run / "config.yaml").write_text("</pre><script>alert(4)</script>")
    recorded(run / "record", replace_text(make_step(), HARM, prompt=HARM, name=f"../../{HARM}"))
    with served(run) as address:
        page.goto(address)
        page.get_by_text("<img src=x onerror=alert(2)>/loss").wait_for()
        assert page.locator(".run").inner_text() == name
        line = page.locator(".chart .title", has_text="alert('x')").first.get_attribute("title")
        assert "reward function `<script>alert('x')</script>" in line and "[U+202E]" in line and "\u202e" not in line
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".list li .head")
        head = page.locator(".list .head").first.inner_text()
        assert head.startswith("<script>alert('x')</script><img src=x") and "␛[31mred" in head and "[U+202E]" in head
        assert "<script>" in page.locator(".question pre").inner_text() and "../../<script>" in titles(page)
        page.goto(f"{address}#run")
        page.get_by_text("configuration").click()
        page.locator(".config", has_text="alert(4)").wait_for()
        assert page.locator("main script, main img[onerror], b[onmouseover]").count() == 0


def test_a_damaged_run_opens_and_reports_the_damage(page, tmp_path):
    run = fake_run(tmp_path / "run")
    (part,) = (run / "record").iterdir()
    data = bytearray(part.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    part.write_bytes(data)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"half": \n')
    with served(run) as address:
        page.goto(f"{address}#rollouts?latest=false")
        page.wait_for_selector(".list li .head")
        page.get_by_text("metrics.jsonl: 1 lines are damaged and left out").wait_for()
        assert "Step 1" in titles(page)


def test_runs_of_others(page, tmp_path):
    rows = [{"input": "2 + 2?", "output": f"it is {k}", "gts": "4", "score": k / 4, "step": 1} for k in (4, 5)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(tmp_path) as address:
        page.goto(f"{address}#rollouts")
        page.wait_for_selector(".response.plain")
        assert page.locator(".response").inner_text() == "it is 4"
        page.get_by_text("no numbers for single tokens").wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1920, "dark")])  # and from each to the other
def test_it_fits_the_screen_in_light_and_dark(chromium, tmp_path, width, scheme):
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    with served(fake_run(tmp_path / "run")) as address:
        for tab in ("curves", "rollouts", "rollouts?view=group", "run"):
            page.goto(f"{address}#{tab}")
            page.wait_for_selector(".chart, .sample header")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
            red, *_ = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))
            assert (red > 200) == (scheme == "light")
            page.keyboard.press("t")
            other, *_ = map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")))
            assert (other > 200) != (red > 200)
            page.keyboard.press("t")
    context.close()
