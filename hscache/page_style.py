"""The look of `hscache inspect --html`: one style sheet, light and dark."""

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5d6878;--line:#e3e7ec;--grid:#e9ecf0;
--c0:#3b6fd4;--c1:#e39b12;--c2:#e2574c;--c3:#2f9e8f;--c4:#8a5cd6;--c5:#4a9c3d;--bad:#d3263d;
--gone:#b9c2cd;--none:#e6e9ee;--band:#3b6fd414;--s:#fdf0d3;--a:#dbe7fd;--a-edge:#3b6fd4}
@media (prefers-color-scheme:dark){:root{--bg:#10141a;--card:#181e26;--ink:#e4e9f0;--soft:#98a4b4;
--line:#2a323d;--grid:#262e38;--c0:#6d9bf5;--c1:#f0b545;--c2:#f27d72;--c3:#4fc4b3;--c4:#b18cf0;
--c5:#78c46a;--bad:#ff5c70;--gone:#4b5664;--none:#232b35;--band:#6d9bf51f;--s:#47391a;--a:#21365f;
--a-edge:#6d9bf5}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1140px;margin:0 auto;padding:32px 20px 60px}
header{margin-bottom:20px}
.kicker{margin:0;color:var(--soft);font-size:13px;letter-spacing:.04em}
h1{margin:2px 0 4px;font-size:26px;line-height:1.25;overflow-wrap:anywhere}
h2{margin:0 0 12px;font-size:16px}
p{margin:6px 0;color:var(--soft);font-size:14px}
section,details{background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:18px 20px;margin-top:16px;min-width:0}
summary{cursor:pointer;font-weight:600;font-size:16px}
details .scroll{margin-top:12px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:16px}
.pair>section{margin-top:16px}
section .pair{margin-top:14px}
@media (max-width:800px){.pair{grid-template-columns:1fr;gap:0}}
.progress{height:8px;border-radius:4px;background:var(--none);overflow:hidden}
.progress div{height:100%;background:var(--c0)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(125px,1fr));gap:10px;
margin-top:14px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 12px}
.tile b{display:block;font-size:18px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:12.5px}
.tile.alarm b{color:var(--bad)}
figure{margin:0;min-width:0}
figcaption{color:var(--soft);font-size:13.5px;margin-bottom:4px}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid)}
.band{fill:var(--band)}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}
.c3{fill:var(--c3)}.c4{fill:var(--c4)}.c5{fill:var(--c5)}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}
.l3{stroke:var(--c3)}.l4{stroke:var(--c4)}.l5{stroke:var(--c5)}
.bad{fill:var(--bad)}.gone{fill:var(--gone)}.none{fill:var(--none)}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:8px;font-size:13px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.key i.c0{background:var(--c0)}.key i.c1{background:var(--c1)}.key i.c2{background:var(--c2)}
.key i.c3{background:var(--c3)}.key i.c4{background:var(--c4)}.key i.c5{background:var(--c5)}
.key i.bad{background:var(--bad)}.key i.gone{background:var(--gone)}
.key i.none{background:var(--none)}
.scroll{overflow-x:auto;margin-top:10px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:600;border-bottom:1px solid var(--line)}
th,td{padding:4px 14px 4px 0;vertical-align:top}
td{border-bottom:1px solid var(--line);overflow-wrap:anywhere}
td.n{white-space:nowrap}
.text{white-space:pre-wrap;overflow-wrap:anywhere;margin-top:10px;padding:14px 16px;
border:1px solid var(--line);border-radius:8px;max-height:560px;overflow-y:auto;
font:13.5px/1.75 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
.token{border-radius:3px}
.token.x{color:var(--soft)}
.token.s{background:var(--s)}
.token.a{background:var(--a);box-shadow:inset 0 -2px var(--a-edge)}
.key .token{padding:0 6px}
footer{margin-top:24px;color:var(--soft);font-size:12.5px}
"""
