"""Texts of tests that try to break out of every format: ids, messages, module paths, notes and reasons may be any of them."""

from __future__ import annotations

TEXTS: dict[str, str] = {
    "quotes": 'say "it\'s" """ \'\'\' \\',
    "newlines": "one\ntwo\r\nthree\rfour\u2028five\u0085six",
    "colons": "test_a[x::y,file=evil.py,line=1::z]",
    "percent": "100 % of %s %(name)s %n %%",
    "encoded": "%0A::error file=evil.py::broken out%0D%25%3A%2C",
    "command": "\n::error file=evil.py,line=1,title=evil::broken out\n##[error]broken out\n::stop-commands::x\n",
    "script": "<script>alert(1)</script>",
    "tags": '</details></summary></code></td></table><img src=x onerror="alert(1)"><b>bold',
    "cdata": "]]></system-out><![CDATA[ ]]>",
    "entities": "&lt;script&gt; &amp; &#60; &copy; &nbsp",
    "pipes": "a|b||c\\|d\\\\|e",
    "backticks": "`a` ``b`` ```c\n```\nd",
    "fence": "```\n<b>broken out</b>\n```\n~~~\n",
    "mention": "@someone @org/team",
    "reference": "#1 GH-1 owner/repo#2 deadbeefdeadbeefdeadbeefdeadbeefdeadbeef",
    "link": "[x](http://example.com) ![y](http://example.com/a.png) http://example.com <http://example.com> www.example.com",
    "comment": "<!-- hidden --> --> <!--",
    "emphasis": "**a** __b__ *c* _d_ ~~e~~ $f$ :smile: \\a",
    "blocks": "\n# title\n\n- item\n> quote\n\n    code\n---\n| a | b |\n|---|---|\n| c | d |\n",
    "bidi": "\u202eevil\u202c \u2066x\u2069 \u200f\u05d0\u05d1",
    "zero-width": "a\u200bb\u200dc\ufeffd\u2060e",
    "controls": "a\x01\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x1b]0;title\x07\x7f\x9b31m",
    "nul": "a\x00b",
    "surrogates": "a\ud800b\udfffc\udcff",
    "noncharacters": "a\ufffeb\uffffc\U0001ffffd",
    "wide": "漢字かな한글 🧑‍🚀 e\u0301",
    "formulas": "=HYPERLINK(1) +1 -1 @SUM(1)",
    "template": "{{ 7 * 7 }} ${{ secrets.X }} {% raw %} ${HOME} $(id) `id`",
    "json": '", "passed": true, "x": "\\',
    "toml": '"\n[[evil]]\nx = """\n',
    "spaces": "  two  leading,\tone tab, trailing  ",
    "nothing": "",
    "long": "x" * 5_000 + "<b>|`" + "y " * 2_500,
}
"""By what is nasty about them."""

ALL = "\n".join(TEXTS.values())
"""All in one, for formats that write a text through an escaping function which has a test of its own over all of them."""
