"""Search learning rate and codebooks with Optuna; trials that fall behind the median are stopped.

Prints each of the 12 trials when it ends: about 8 minutes on two CPU cores.

    python examples/optuna_sweep.py configs/base.yaml --trials 12 --steps 240 train.batch_size=64

Every trial is a run in `runs/<name>-<number>`, trained in this process. Its value is a metric of an evaluation
(--metric), after every `--every` steps. Everything is drawn from --seed, so the same command gives the same trials.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from vqclip.errors import ConfigError, VqclipError
from vqclip.train import Callback, run

METRIC = "eval/captions of unseen combinations/codes_only/t2i_r10"


class Prune(Callback):
    """Report every evaluation to a trial, and stop the run if the trial should be pruned."""

    def __init__(self, trial, metric: str):
        self.trial, self.metric = trial, metric

    def on_step_end(self, training):
        """Report after an evaluation; the last one is the trial's value."""
        if training.done % training.config.train.evaluate_every == 0 and not training.is_last:
            self.trial.report(find_metric(training.metrics, self.metric), training.done)
            if self.trial.should_prune():
                training.request_stop("pruned", checkpoint=False)


def find_metric(metrics: Mapping[str, float], name: str) -> float:
    """Return a metric by name; raises ConfigError if the evaluations have no such metric."""
    if name not in metrics:
        names = ", ".join(sorted(each for each in metrics if each.startswith("eval/"))) or "none"
        raise ConfigError(f"--metric: got {name!r}; expected a metric of an evaluation: {names}")
    return metrics[name]


def draw_overrides(trial) -> list[str]:
    """Draw the settings of a trial."""
    lr = trial.suggest_float("lr", 3e-4, 1e-2, log=True)
    codebooks = trial.suggest_categorical("codebooks", [4, 8, 16])
    levels = trial.suggest_categorical("levels", ["8 8 8 8", "4 4 4 4", "2 2 2 2"])
    layer = f"{{kind: fsq, levels: [{levels.replace(' ', ', ')}]}}"
    quantizer = f"{{kind: product, codebooks: {codebooks}, layer: {layer}}}"
    return [f"optim.lr={lr!r}", f"model.image.quantizer={quantizer}", f"model.text.quantizer={quantizer}"]


def print_trial(_, trial) -> None:
    """Print a trial when it ends."""
    value = "none" if trial.value is None else f"{trial.value:.4f}"
    steps = trial.user_attrs["steps"]
    print(f"{trial.number} {trial.state.name.lower()} after {steps}: {value} {trial.params}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file of a run, with an evaluation")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all trials")
    parser.add_argument("--name", default="sweep", help="beginning of the trials' run.name")
    parser.add_argument("--metric", default=METRIC, help=f"larger is better ({METRIC})")
    parser.add_argument("--trials", type=int, default=12, help="number of trials")
    parser.add_argument("--steps", type=int, default=240, help="steps of a trial")
    parser.add_argument("--every", type=int, default=60, help="steps between two evaluations")
    parser.add_argument("--seed", type=int, default=0, help="of the sampler and of the runs")
    options = parser.parse_intermixed_args(arguments)
    print(__doc__.partition("\n\n    ")[0], file=sys.stderr)
    import optuna  # pip install 'vqclip[examples]'

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    always = [f"train.steps={options.steps}", f"train.evaluate_every={options.every}", f"run.seed={options.seed}"]

    def objective(trial: optuna.Trial) -> float:
        own = [f"run.name={options.name}-{trial.number:03d}", "run.resume=never", *draw_overrides(trial)]
        result = run(options.config, [Prune(trial, options.metric)], overrides=[*options.overrides, *always, *own])
        trial.set_user_attr("steps", result.step)
        if result.stopped not in (None, "pruned"):  # Ctrl-C
            study.stop()
        if not result.finished:
            raise optuna.TrialPruned(result.stopped)
        return find_metric(result.metrics, options.metric)

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=options.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=options.trials, callbacks=[print_trial])
    finished = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if finished:
        print(f"best: {study.best_trial.number} {study.best_value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except VqclipError as error:
        sys.exit(f"error: {error}")
