"""How the report looks: light and dark, on a screen, on paper."""

STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--dim:#656d76;--paper:#fff;--line:#d8dee4;--grid:#eaeef2;--warn:#9a3412;
--c1:#2563c9;--c2:#c2571a;--c3:#2a8a4a;--c4:#8a4fbf}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#8d96a0;--paper:#0d1117;--line:#30363d;--grid:#21262d;
--warn:#f0a070;--c1:#6ea8fe;--c2:#f0935a;--c3:#5fcf86;--c4:#c297f0}}
*{box-sizing:border-box}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1200px;margin:0 auto;
padding:24px}
h1{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:17px;margin:32px 0 8px;padding-top:10px;border-top:1px solid var(--line)}
h3{font-size:14px;margin:20px 0 4px}
p{margin:4px 0 8px}
.dim{color:var(--dim);font-weight:normal}
.warn{color:var(--warn)}
nav a{margin-right:14px}
a{color:var(--c1)}
dl{display:flex;flex-wrap:wrap;gap:10px 32px;margin:14px 0}
dt{color:var(--dim);font-size:12px}
dd{margin:0;font-size:17px;font-variant-numeric:tabular-nums}
dd small{font-size:12px;color:var(--dim)}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:6px 0 4px;font-variant-numeric:tabular-nums}
th{text-align:left;font-size:12px;color:var(--dim);font-weight:600;vertical-align:bottom}
th,td{padding:3px 18px 3px 0;border-bottom:1px solid var(--grid)}
td{vertical-align:top;overflow-wrap:anywhere;min-width:4ch}
td.s{white-space:nowrap}
.label{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.n{text-align:right;white-space:nowrap}
td.t{max-width:56ch;min-width:20ch}
code{font:12px ui-monospace,monospace}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(420px,100%),1fr));gap:18px 28px}
.three{grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr))}
figure{margin:0;break-inside:avoid;min-width:0}
figcaption{font-size:13px}
.key{margin-left:12px;white-space:nowrap;font-size:12px}
.key i,.lanes i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.lanes span{margin-right:14px;white-space:nowrap}.lanes svg{min-width:860px}
svg{width:100%;height:auto;display:block}
svg text{font-size:11px}svg text:not(.label){fill:var(--dim)}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--line);fill:none}
.l1,.l2,.l3,.l4{fill:none;stroke-width:1.6;stroke-linejoin:round}
.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}.l3{stroke:var(--c3)}.l4{stroke:var(--c4)}
.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}
.k1{background:var(--c1)}.k2{background:var(--c2)}.k3{background:var(--c3)}.k4{background:var(--c4)}
.b1,.b2,.b3,.b4{opacity:.16}.b1{fill:var(--c1)}.b2{fill:var(--c2)}.b3{fill:var(--c3)}.b4{fill:var(--c4)}
.h{fill:transparent}
.lanes text[fill="#222222"]{fill:var(--ink)}
.lanes [stroke="#e6e8eb"]{stroke:var(--grid)}
@media(prefers-color-scheme:dark){.lanes [stroke="#1d4f91"]{stroke:#5b9bea}.lanes [fill="#1d4f91"]{fill:#5b9bea}
.lanes [stroke="#b4451f"]{stroke:#f0935a}.lanes [fill="#b4451f"]{fill:#f0935a}
.lanes i[style*="#1d4f91"]{background:#5b9bea!important}.lanes i[style*="#b4451f"]{background:#f0935a!important}}
@media print{:root{--ink:#000;--dim:#444;--paper:#fff;--line:#bbb;--grid:#ddd;--warn:#9a3412;--c1:#2563c9;--c2:#c2571a;
--c3:#2a8a4a;--c4:#8a4fbf}body{max-width:none;padding:0;font-size:11px}nav{display:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}.wide{overflow:visible}.lanes svg{min-width:0}h2,h3{break-after:avoid}tr{break-inside:avoid}
.charts{grid-template-columns:1fr 1fr}.three{grid-template-columns:1fr 1fr 1fr}thead{display:table-header-group}}
"""
