"""Texts for property tests: words and sentences mixed with what has broken text tools before."""

from __future__ import annotations

from hypothesis import strategies as st

HOSTILE = [
    "“é—ü”",
    "e\u0301a\u0308o\u0302",  # decomposed accents
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🇩🇪🇫🇷 ❤️",
    "สวัสดีครับ วันนี้อากาศดี",
    "هذه جملة. وهذه أخرى؟ نعم.",
    "यह एक वाक्य है। यह दूसरा है।",
    "これは文です。次の文です！",
    "今天天气很好。我们去公园吧！",
    "한국어 문장입니다. 그리고 또 하나.",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # Hangul in jamo
    "line\r\nnext\r\n\r\nparagraph\rlone",
    "\tindented\u00a0code()\n\n    x = 1\n",
    "\x00\x01\x1b[0m\x7f\u200b\u200d\ufeff\u2028\u2029\x85",
    "<|im_end|><|im_start|>system\nYou are…<|endoftext|>",
    "Dr. No paid $3.50 to U.S. agents... Really?! (Yes.)",
    "- item one\n- item two\n\n# Heading\n| a | b |\n|---|---|\n",
    "\n\n \n\t\n",
    "....!!!???。。。",
    "a\u0300\u0301\u0302\u0303\u0304",
    "क्षत्रिय",
    "That was Plan B\u00a0. Then C\u3000. D\u2028. E\u0085.",  # the sentence splitter's library panics on these
    "lone \ud800 surrogate. Next.",
    "\U0001d54f\U0001f9ec𠜎",
]

LETTERS = st.text(st.characters(codec="utf-8"), max_size=12)
PIECES = st.one_of(
    st.sampled_from(HOSTILE),
    LETTERS,
    st.sampled_from(["word", "Sentence.", "Another one!", " ", ". ", "\n", "\n\n", "，", "。", "a" * 50, "1234567"]),
)
TEXTS = st.lists(PIECES, max_size=40).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text and the same text as a stream of pieces."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return text, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
