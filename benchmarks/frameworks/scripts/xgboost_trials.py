"""Search the depth of XGBoost's trees on scikit-learn's digits, with Ray's callback for XGBoost."""

import os
import time

import ray
import xgboost
from outcome import arguments, tell, tune_config
from ray import tune
from ray.tune.integration.xgboost import TuneReportCheckpointCallback
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def with_process(report):
    return {**report, "process": os.getpid()}


def train(config):
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
    settings = {
        "objective": "multi:softmax",
        "num_class": 10,
        "eval_metric": ["mlogloss", "merror"],
        "max_depth": config["max_depth"],
        "subsample": 0.8,
        "seed": 0,
    }
    report = TuneReportCheckpointCallback(
        {"loss": "eval-mlogloss", "error": "eval-merror"}, frequency=5, results_postprocessing_fn=with_process
    )
    train_set, eval_set = xgboost.DMatrix(x, y), xgboost.DMatrix(x_test, y_test)
    xgboost.train(settings, train_set, 10, evals=[(eval_set, "eval")], verbose_eval=False, callbacks=[report])


if __name__ == "__main__":
    args = arguments(trials=6)
    ray.init(num_cpus=2, include_dashboard=False)
    tuner = tune.Tuner(
        train,
        param_space={"max_depth": tune.grid_search(list(range(2, 2 + args.trials)))},
        tune_config=tune_config(args),
        run_config=tune.RunConfig(name="xgboost_trials", storage_path=args.storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    tell(results, time.perf_counter() - started, ["loss", "error"])
