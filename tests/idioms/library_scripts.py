"""Training functions as the guides of scikit-learn, joblib and Python have them."""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import sqlite3
import tempfile
import threading
import warnings
from typing import Any

import numpy
from ray import tune


def table(seed: int, n: int = 120) -> tuple[numpy.ndarray, numpy.ndarray]:
    from sklearn.datasets import make_classification

    return make_classification(n, 8, random_state=seed)


def unseeded_numpy(config: dict[str, Any]) -> None:
    """Common pitfalls: the global random state seeded once."""
    from sklearn.neural_network import MLPClassifier

    numpy.random.seed(config["seed"])
    x, y = table(config["seed"])
    warnings.filterwarnings("ignore")
    model = MLPClassifier((8,), max_iter=5, early_stopping=True).fit(x, y)
    tune.report({"loss": model.loss_, "drawn": float(numpy.random.rand())})


def n_jobs(config: dict[str, Any]) -> None:
    """Grid search with processes by joblib's loky, which stay for five minutes."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    x, y = table(config["seed"])
    search = GridSearchCV(LogisticRegression(), {"C": [0.01, 1.0]}, n_jobs=2, cv=2).fit(x, y)
    tune.report({"loss": 1 - search.best_score_, "C": search.best_params_["C"]})


def cached_pipeline(config: dict[str, Any]) -> None:
    """User guide: caching transformers in a temporary directory, and one in the working directory."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    x, y = table(config["seed"])
    for memory in (tempfile.mkdtemp(), "cache"):
        model = make_pipeline(PCA(3), LogisticRegression(), memory=memory).fit(x, y)
        tune.report({"loss": 1 - model.score(x, y)})


def global_settings(config: dict[str, Any]) -> None:
    """``set_config``, numpy's error state and print options, as at the top of notebooks."""
    import sklearn

    x, _ = table(config["seed"])
    seen = f"{numpy.geterr()['over']} {sklearn.get_config()['display']} {numpy.array([1 / 3])}"
    sklearn.set_config(display="text", assume_finite=True)
    numpy.seterr(all="raise")
    numpy.set_printoptions(precision=2)
    logging.basicConfig(filename="log.txt", level=logging.INFO, force=True)
    logging.info("loss")
    tune.report({"loss": float(x.sum()), "seen": seen})


def square(x: int) -> int:
    return x * x


def pool(config: dict[str, Any]) -> None:
    """multiprocessing's first example, and a pool that nobody closes."""
    with multiprocessing.Pool(2) as two:
        first = sum(two.map(square, range(config["seed"])))
    global left
    left = multiprocessing.get_context("fork").Pool(1)
    tune.report({"loss": float(first + left.apply(square, (3,)))})


def futures(config: dict[str, Any]) -> None:
    """Executors that nobody shuts down."""
    global threads, processes
    threads = concurrent.futures.ThreadPoolExecutor(2)
    processes = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"))
    tune.report({"loss": float(sum(threads.map(square, range(4)))) + processes.submit(pow, config["seed"], 2).result()})


def background_thread(config: dict[str, Any]) -> None:
    """A thread that fetches ahead, and is told to end at the end of the process only."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(600,), daemon=True, name="prefetcher")
    thread.start()
    tune.report({"loss": float(config["seed"])})


def database(config: dict[str, Any]) -> None:
    """A connection that is left open with a transaction committed."""
    global connection
    connection = sqlite3.connect("results.db")
    connection.execute("create table if not exists losses (loss real)")
    connection.execute("insert into losses values (?)", (config["seed"],))
    connection.commit()
    tune.report({"loss": float(connection.execute("select sum(loss) from losses").fetchone()[0])})


def buffered_file(config: dict[str, Any]) -> None:
    """A file that nobody closes."""
    global file
    file = open("history.csv", "w")  # noqa: SIM115
    for step in range(3):
        file.write(f"{step},{config['seed']}\n")
    tune.report({"loss": float(config["seed"])})


def environment(config: dict[str, Any]) -> None:
    """Threads and devices by environment variables, set before libraries are used."""
    import torch

    before = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    os.environ["OMP_NUM_THREADS"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(2)
    tune.report({"loss": float(config["seed"]), "seen": str(before)})


SCRIPTS = [
    unseeded_numpy,
    n_jobs,
    cached_pipeline,
    global_settings,
    pool,
    futures,
    background_thread,
    database,
    buffered_file,
    environment,
]
