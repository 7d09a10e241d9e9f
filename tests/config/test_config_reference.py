"""The list of the config's fields is complete, and docs/config.md is what it gives today."""

from pathlib import Path

from jaxformer.config import hints, reference

ROOT = Path(__file__).resolve().parents[2]


def test_every_field_is_listed_with_what_it_means():
    sections = reference.list_sections()
    listed = {f"{path}.{field.name}" for section in sections for path in section.paths for field in section.fields}
    assert set(hints.field_paths()) <= listed
    silent = [
        f"{section.name}.{field.name}"
        for section in reference.list_sections()
        for field in section.fields
        if not field.meaning
    ]
    assert silent == [], "config/schema.py: a comment beside the field says what it means"


def test_meanings_are_the_comments_of_the_schema():
    found = {section.name: {field.name: field for field in section.fields} for section in reference.list_sections()}
    assert found["TrainConfig"]["log_every"] == ("log_every", "int", "at least 1", "20", "steps between two log lines")
    assert found["InitConfig"]["directory"].meaning.endswith(
        "A recipe that names no model gets the directory's, and its tokenizer"
    )
    assert found["OptimizerConfig"]["decay_exclude"].default == "bias,scale,embed"
    assert found["StackConfig"]["moe"].type == "MoEConfig or None"
    assert found["StackConfig"]["dropout"].allowed == "at least 0 and less than 1"
    assert found["RecurrentConfig"]["cell"].allowed == "rnn, lstm, gru"
    assert found["TaskConfig"]["name"].allowed.startswith("none, answering, ")


def test_the_page_is_current():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == reference.format_page(), "write it again: python -m jaxformer.config.reference > docs/config.md"
