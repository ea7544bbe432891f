"""The page of a run: `fluidtune view`, and `fluidtune report --html`.

Decides what the page is told of a run (run_model.py: what has changed since any earlier moment), how a log is followed
while it is written, replaced or deleted (followed_run.py), which runs there are (run_list.py), and who may ask for it
(page_server.py). service_figures.py knows what else there is to show. page_file.py puts the same page into one
file. How it looks is in static/. docs/view.md is its page.

It reads event logs by the readers of fluidtune/report, and needs neither Ray nor the job's process. Start with
run_model.py.
"""
