"""The style sheet of a report's HTML page."""

STYLE = """\
:root {
  color-scheme: light dark;
  --text: #1d2430; --dim: #5b6678; --page: #ffffff; --raised: #f5f7fa; --line: #dde3ea; --link: #1558c0;
  --kernel: #2f6f4f; --library: #3b5b9a; --op: #7a4fa3; --cut: #b3410e; --notice: #fff6e0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e3e8ef; --dim: #9aa6b6; --page: #12161c; --raised: #1a2029; --line: #2d3642; --link: #7fb2ff;
    --kernel: #7fd1a5; --library: #9bb8f5; --op: #cba6f2; --cut: #ff9b66; --notice: #33290f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 5rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
h4 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
h1, h2, h3, h4 { overflow-wrap: anywhere; }
p, ul { margin: .5rem 0; max-width: 60rem; }
a { color: var(--link); }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .86em; }
code { overflow-wrap: anywhere; }
pre { margin: .4rem 0 .8rem; padding: .8rem 1rem; max-height: 34rem; overflow: auto; line-height: 1.45;
  background: var(--raised); border: 1px solid var(--line); border-radius: 6px; }
pre code { overflow-wrap: normal; white-space: pre; font-size: .8rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1rem; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td code { white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
ul { padding-left: 1.2rem; }
ul.important { list-style: none; padding: .7rem 1rem; background: var(--notice); border-radius: 6px; }
summary { cursor: pointer; }
details.fold { margin: .6rem 0; padding: .45rem .9rem; border: 1px solid var(--line); border-radius: 8px; }
details.fold > summary { font-weight: 600; overflow-wrap: anywhere; }
details.fold[open] > summary { margin-bottom: .4rem; }
ol.strip { list-style: none; display: flex; flex-wrap: wrap; gap: .35rem; margin: .8rem 0; padding: 0;
  font-size: .85rem; }
ol.strip li { padding: .15rem .6rem; border: 1px solid var(--line); border-radius: 4px; background: var(--raised);
  overflow-wrap: anywhere; }
ol.strip li.cut { color: var(--cut); border-color: currentColor; background: none; }
ol.steps { list-style: none; margin: .2rem 0 .8rem; padding: 0; }
ol.steps li { border-bottom: 1px solid var(--line); padding: .22rem 0; }
ol.steps li:last-child { border-bottom: 0; }
.bare { padding-left: 1.05rem; }
.line { display: inline-flex; align-items: baseline; max-width: calc(100% - 1.2rem); overflow-wrap: anywhere; }
.kind { flex: 0 0 3.9rem; font-size: .8rem; font-weight: 600; }
.kind.kernel { color: var(--kernel); } .kind.library { color: var(--library); }
.kind.op { color: var(--op); } .kind.cut { color: var(--cut); }
.remark { color: var(--dim); font-size: .85rem; }
@media (max-width: 40rem) { main { padding: 1.2rem .8rem 3rem; } body { font-size: 15px; } }
@media print { pre { max-height: none; } }
"""
