"""Search the width of a Keras network with a layer that each trial registers for saving under a name of its own."""

import os
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy
import ray
from outcome import arguments, tell, tune_config
from ray import tune


def train(config):
    registered = len(keras.saving.get_custom_objects())

    @keras.saving.register_keras_serializable(package="search", name=f"Scale{config['width']}")
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, inputs):
            return inputs * self.factor

    keras.utils.set_random_seed(0)
    x = numpy.random.default_rng(0).normal(size=(256, 16)).astype("float32")
    y = (x[:, :4].sum(axis=1) > 0).astype("float32")
    layers = [keras.layers.Dense(config["width"], activation="relu"), Scale(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    for _ in range(3):
        history = model.fit(x, y, batch_size=32, verbose=0)
        tune.report({"loss": history.history["loss"][0], "registered": registered, "process": os.getpid()})
    model.save("model.keras")


if __name__ == "__main__":
    args = arguments(trials=6)
    ray.init(num_cpus=2, include_dashboard=False)
    tuner = tune.Tuner(
        train,
        param_space={"width": tune.grid_search([4 * (i + 1) for i in range(args.trials)])},
        tune_config=tune_config(args),
        run_config=tune.RunConfig(name="keras_registry", storage_path=args.storage),
    )
    started = time.perf_counter()
    results = tuner.fit()
    tell(results, time.perf_counter() - started, ["loss", "registered"])
