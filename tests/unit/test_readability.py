"""The measure of readability, on words and texts whose counts are known."""

import pytest

from helpers.readability import of_markdown, of_terminal, syllables

BY_THE_DICTIONARY = {
    1: "the trace moved called lone gain steps cause caused GPU's",
    2: "kernel table little between engines changes started needed copies hidden machine language head-start",
    3: "collective reduces profiler elements overlap example library",
    4: "computation available",
    5: "communication",
}
TWO_SENTENCES = "The cat sat on the mat. The dog, which was big, ran off at once."


@pytest.mark.parametrize("count", BY_THE_DICTIONARY)
def test_syllables_are_those_of_the_dictionary(count: int) -> None:
    words = BY_THE_DICTIONARY[count].split()
    assert {word: syllables(word) for word in words} == dict.fromkeys(words, count)


def test_the_measure_is_flesch_s_formula() -> None:
    found = of_markdown(TWO_SENTENCES)
    assert (found.num_sentences, found.num_words, found.num_syllables) == (2, 15, 15)
    assert found.words_per_sentence == 7.5
    assert found.reading_ease == pytest.approx(206.835 - 1.015 * 7.5 - 84.6)
    assert found.longest == "The dog, which was big, ran off at once."


def test_long_words_in_long_sentences_are_hard_to_read() -> None:
    hard = "The organisation's administrative responsibilities necessitate comprehensive interdepartmental communication."
    assert of_markdown(hard).reading_ease < 0 < of_markdown(TWO_SENTENCES).reading_ease


def test_in_markdown_only_prose_counts() -> None:
    rest = "\n\n| a cell | of a table. |\n|---|---|\n\n```sh\nmake. it. so.\n```\n"
    assert of_markdown(f"# A heading of several long words\n\n{TWO_SENTENCES}{rest}") == of_markdown(TWO_SENTENCES)


def test_a_link_a_code_span_and_a_list_item_count_as_read() -> None:
    found = of_markdown(
        "Read [the guide](docs/a_long_name.md) of `make test --now`:\n\n- the first item here\n- then\n  the other.\n"
    )
    assert (found.num_sentences, found.num_words) == (3, 5 + 4 + 3)


def test_on_a_terminal_tables_commands_and_labels_do_not_count() -> None:
    printed = (
        "step   makespan\n───────────────\nas traced   66.34 ms\n\nThe copies move to engines,\nwhich take no SMs.\n"
        "to apply\n\n - save the plan first:\n     counterpoint tune a.json -o plan.toml\nbefore ▂▄███\n"
    )
    found = of_terminal(printed)
    assert (found.num_sentences, found.num_words) == (2, 9 + 4)


def test_a_text_without_a_sentence_is_refused() -> None:
    with pytest.raises(ValueError, match="no sentence"):
        of_markdown("# Heading\n")
