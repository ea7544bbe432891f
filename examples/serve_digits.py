"""The best trial of a search on digits answers requests over HTTP.

    make demo                              # a search; its runs are in demo/
    python examples/serve_digits.py        # serves its winner for a moment, and asks it about 20 images

or, in a Ray cluster (ray start --head), until fluidtune serve stop:

    cd examples
    fluidtune serve start ../demo/fluidtune/digits_elastic --load serve_digits:load --slo 0.2
"""

import argparse
import json
import os
import urllib.request

import torch
from digits_elastic import digits, network

import fluidtune


def load(directory, config):
    """The model of a trial: from its checkpoint to a function from a list of images to as many digits."""
    model = network(config["width"])
    model.load_state_dict(torch.load(os.path.join(directory, "state.pt"))["model"])
    model.eval()

    def classify(images):
        with torch.inference_mode():
            scores = model(torch.tensor(images).reshape(-1, 1, 8, 8)).softmax(1)
        sure, found = scores.max(1)
        return [{"digit": int(digit), "sure": round(float(part), 4)} for digit, part in zip(found, sure, strict=True)]

    classify.samples = digits()[1].tensors[0][:64, 0].tolist()  # 8 x 8 numbers from 0 to 1
    return classify


def ask(url, image):
    body = json.dumps(image).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
        return json.load(answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="demo/fluidtune/digits_elastic", help="directory of the search")
    parser.add_argument("--slo", type=float, default=0.5, help="seconds within which a request is answered")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--metric", default=None, help="needed if FluidTune did not run the search: accuracy")
    args = parser.parse_args()
    mode = "max" if args.metric else None
    with fluidtune.serve(args.run, load, args.slo, metric=args.metric, mode=mode, port=args.port) as served:
        print(f"trial {served.trials[0]} answers at {served.url}")
        images, labels = digits()[1].tensors
        right = 0
        for image, label in zip(images[:20, 0].tolist(), labels[:20].tolist(), strict=True):
            right += ask(served.url, image)["digit"] == label
        print(f"{right} of 20 digits are right")


if __name__ == "__main__":
    main()
