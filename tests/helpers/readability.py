"""How easy prose is to read: Flesch reading ease and words per sentence, of Markdown and of what a command prints.

Reading ease is 206.835 - 1.015 * words per sentence - 84.6 * syllables per word (Flesch 1948): 60 to 70 is plain English,
and below 30 is for graduates. Only prose counts. Headings, tables, drawings and blocks of code are left out. A code span is
one word of one syllable, and a figure is no word. A sentence ends at a full stop, at a question mark, or at the end of its
paragraph or list item. Syllables are counted by groups of vowels, which is right for 9 words of 10.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

CODE_SPAN = "code"
LEAST_WORDS_OF_A_SENTENCE = 4  # a shorter line without a full stop is a label

_FENCE = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
_HTML = re.compile(r"<!--.*?-->|</?[a-z][^>\n]*>", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_HEADING = re.compile(r"#{1,6} ")
_DRAWING = re.compile(r"[│─━═┃▁▂▃▄▅▆▇█]")
_COLUMNS = re.compile(r"\S {2,}\S")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"']*\s+")
_WORD = re.compile(r"[A-Za-z][\w'-]*")
_VOWELS = re.compile(r"[aeiouy]+")
_SILENT_END = re.compile(r"(?:[^laeiouy]e|[^laeiouysxzcgh]es|[aeiouy]les?|[^aeioutdy]ed)$")


@dataclass(frozen=True)
class Readability:
    """Counts over a text."""

    num_sentences: int
    num_words: int
    num_syllables: int
    longest: str
    """The sentence of most words."""

    @property
    def words_per_sentence(self) -> float:
        return self.num_words / self.num_sentences

    @property
    def reading_ease(self) -> float:
        return 206.835 - 1.015 * self.words_per_sentence - 84.6 * self.num_syllables / self.num_words


def of_markdown(text: str) -> Readability:
    """Of the prose of a Markdown page."""
    text = _LINK.sub(r"\1", _HTML.sub(" ", re.sub(r"`[^`\n]+`", CODE_SPAN, _FENCE.sub("\n", text))))
    return _count("" if _HEADING.match(line) or line.lstrip().startswith("|") else line for line in text.splitlines())


def of_terminal(text: str) -> Readability:
    """Of the sentences in a command's output: rows of columns, drawings, indented commands and labels are left out."""

    def is_prose(line: str) -> bool:
        return not (_DRAWING.search(line) or _COLUMNS.search(_ITEM.sub("", line)) or line.startswith("    "))

    return _count(line if is_prose(line) else "" for line in text.splitlines())


def syllables(word: str) -> int:
    """Of an English word, 1 or more."""
    word = re.sub(r"'s?$", "", word.lower())
    parts = [part for part in re.split(r"[-_]", word) if part]
    return sum(max(1, len(_VOWELS.findall(part)) - bool(_SILENT_END.search(part))) for part in parts)


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Lines joined where a sentence may go on from one to the next: not over an empty line, nor into a list item."""
    paragraphs = [""]
    for line in lines:
        if not line.strip() or _ITEM.match(line):
            paragraphs.append("")
        paragraphs[-1] += " " + _ITEM.sub("", line).strip()
    return [paragraph.strip() for paragraph in paragraphs]


def _count(lines: Iterable[str]) -> Readability:
    sentences = [
        (words, sentence)
        for paragraph in _paragraphs(lines)
        for sentence in _SENTENCE_END.split(paragraph)
        if (words := _WORD.findall(sentence))
        and (len(words) >= LEAST_WORDS_OF_A_SENTENCE or sentence.rstrip(")\"'").endswith((".", "!", "?")))
    ]
    if not sentences:
        raise ValueError("The text holds no sentence.")
    return Readability(
        num_sentences=len(sentences),
        num_words=sum(len(words) for words, _ in sentences),
        num_syllables=sum(syllables(word) for words, _ in sentences for word in words),
        longest=max(sentences, key=lambda entry: len(entry[0]))[1],
    )
