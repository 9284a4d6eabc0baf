"""One process of a job: from the command to the end of the run, with all errors reported."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megapipe.cli import Command, flatten, show
from megapipe.command_line import check_temporary_folder, load_torch, phase
from megapipe.config.config import Config
from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.distributed.environment import set_environment
from megapipe.errors import ConfigError, DoesNotFit, MegapipeError, Preempted
from megapipe.launch import devices, progress, rendezvous
from megapipe.launch.affinity import bind_near
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.launcher import nodes_of
from megapipe.launch.listen_address import listen_beside
from megapipe.launch.open_files import allow_connections
from megapipe.launch.shutdown import Shutdown
from megapipe.launch.signals import StopRequest
from megapipe.layout.devices import device_kind
from megapipe.layout.elastic_checks import check_fewest, check_layouts
from megapipe.layout.layout import DeviceKind, Layout
from megapipe.layout.measurements import ExpertForm, Measurements
from megapipe.layout.moe.checks import check_imbalance
from megapipe.layout.moe.dispatch import on_nodes
from megapipe.layout.moe.rebalance_checks import check_pool
from megapipe.layout.resolve import resolve
from megapipe.layout.sequence_slices import check_timeable
from megapipe.observe.observer import check_sinks
from megapipe.observe.provenance import newest_config, package_hash
from megapipe.plan.activation_split import freed_by_input_grad
from megapipe.plan.figures import plan_figures
from megapipe.plan.json_report import as_json
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import fit_text, fits, size_text
from megapipe.plan.moe.moe_layer_time import chosen_form
from megapipe.plan.report import as_text
from megapipe.plan.units import units_of_run
from megapipe.train.searched_layout import search_layout, with_values
from megapipe.util import heartbeat, retries
from megapipe.watch.journal import Journal, text
from megapipe.watch.rank import WATCHED_S, RankWatch

if TYPE_CHECKING:
    import torch

    from megapipe.distributed.mesh import ParallelMesh
    from megapipe.train.callbacks.callback import Callback


SEARCH_S = 3600.0
"""Seconds that other ranks wait for a layout that rank 0 searches. A failure of rank 0 ends them at
once."""


class _Resolved(NamedTuple):
    """A configuration and a layout, resolved as far as possible so far."""

    config: Config
    layout: Layout


def start(
    command: Command,
    info: LaunchInfo,
    stop: StopRequest,
    shutdown: type[Shutdown] = Shutdown,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Train, print the plan, or measure slice times, as `command` says; return the exit code.

    Raises :class:`MegapipeError` for errors before the rendezvous. Later errors are reported by
    `shutdown`, once per job.
    """
    if info.local_rank > 0:
        retries.be_quiet()
    stop.speaks = info.rank == 0
    for line in (command.notice, command.defaults):
        if info.rank == 0 and line is not None:
            heartbeat.print_notice(line)
    stop.launcher = os.getppid() if info.hosted else None
    if not command.dry_run:  # before user code may load torch
        check_temporary_folder()
        _set_environment(command)
    if command.searched and command.dry_run and info.rank > 0:
        return 0
    if command.searched and (info.world == 1 or command.dry_run):
        command = with_values(command, search_layout(command, _gpus(command, info)))
    resolved = None if command.searched else _resolve(command, info)
    if command.dry_run and resolved is not None:
        if info.rank == 0:
            _print_plan(command, *resolved)
        return 0
    if command.time_slices and resolved is not None:
        check_timeable(resolved.config, resolved.layout.schedule.slices)
    # torch is loaded after the configuration is known to be right, unless user code has loaded it
    if info.rank == 0:
        load_torch()
    import torch

    if command.config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    with stop.steady if info.hosts else nullcontext():  # only one thread can open the store
        process = _Process(command, info, resolved, shutdown)
        stop.leave, stop.interrupt = process.ending.stop, process.ending.interrupt
    return process.run(stop, callbacks)


def _set_environment(command: Command) -> None:
    """Set environment variables that libraries read when they are loaded."""
    config = command.config
    one_stage = config.parallel.pp == 1 and "parallel.pp" not in command.searched
    alone = one_stage or config.pipeline.transport == "in_process"
    set_environment(
        os.environ,
        sends_messages=not alone and device_kind(config) == "cuda",
        deterministic=config.run.deterministic,
    )


def _resolve(command: Command, info: LaunchInfo) -> _Resolved:
    """Resolve the configuration, and check everything that needs no torch and no other process."""
    given = on_nodes(command.config, info.local_world) if info.launched else command.config
    measure = None if info.launched and not command.dry_run else BY_UNITS
    world = _world(command, info)
    config, layout = resolve(given, world, None, where=command.where, measure=measure)
    check_layouts(given, layout.world, where=command.where, measure=BY_UNITS)
    if info.options is not None:
        nodes, ranks = nodes_of(info.options), info.local_world
        check_fewest(given, nodes, ranks, where=command.where, measure=BY_UNITS)
    check_sinks(config.log)
    check_pool(config, layout)
    check_imbalance(config, command.imbalance)
    return _Resolved(config, layout)


def _world(command: Command, info: LaunchInfo) -> int | None:
    """Return the number of processes; None if a plan without a launcher leaves it to the layout."""
    return None if command.dry_run and not info.launched else info.world


def _gpus(command: Command, info: LaunchInfo) -> int:
    """Return the number of processes for which a layout is searched. Raises :class:`ConfigError` if
    a plan does not say it."""
    world = _world(command, info) or command.config.plan.gpus
    if world is None:
        raise ConfigError(
            f"{command.where}: the layout is searched for a number of processes: expected --gpus N"
        )
    return world


def _print_plan(command: Command, config: Config, layout: Layout) -> None:
    """Print the plan. Raises :class:`DoesNotFit` if it needs more memory than its device has."""
    if config.model.vocab_size is None:
        config, layout = resolve(
            config,
            layout.world,
            load_tokenizer(config.data.tokenizer).vocab_size,
            where=command.where,
            before=layout,
            measure=BY_UNITS,
        )
    with phase("working out the plan"):
        figures = plan_figures(config, layout, command.imbalance)
    if command.as_json:
        print(json.dumps(as_json(figures)))
    else:
        show(as_text(figures))
    most = figures.memory.most.total
    if fits(most, figures.speeds) is False:
        raise DoesNotFit(
            f"{command.where}: a process needs {size_text(most)}, which "
            f"{fit_text(most, figures.speeds)}"
        )


class _Process:
    """One process of a job, from its connection to the rendezvous store on."""

    def __init__(
        self,
        command: Command,
        info: LaunchInfo,
        resolved: _Resolved | None,
        shutdown: type[Shutdown],
    ) -> None:
        """Connect to the rendezvous store. `resolved`: None if rank 0 has to search the layout."""
        from megapipe.train.trainer import Trainer  # imported late: it takes a while

        self._trainer = Trainer
        self._command = command
        self._resolved = resolved
        config = command.config
        allow_connections(info.world * info.hosts)
        self._timeout = timeout = config.parallel.timeout_s
        self._store = store = rendezvous.open_store(info, timeout)
        self._watched = info.world > 1 and config.parallel.watchdog
        """Whether a monitor ends a hanging job before a process group's time-out does."""
        self._watch: RankWatch | None = None
        self._journal = Journal()
        timeout += WATCHED_S * self._watched
        self.ending = shutdown(info, store, timeout_s=timeout, trace=command.traceback)
        """Shutdown: how the process leaves the job."""

    def run(self, stop: StopRequest, callbacks: Sequence[Callback]) -> int:
        """Train, or measure slice times (``--time-slices``); return the exit code."""
        from megapipe.observe.out_of_memory import is_out_of_memory, out_of_memory
        from megapipe.train.start_point import Finished

        try:
            self._begin_to_watch()
            self._take_layout()
            tokenizer = self._load_tokenizer()
            mesh = self._join(*self._agree(tokenizer))
            try:
                if self._command.time_slices:
                    self._time_slices(mesh)
                else:
                    self._train(mesh, tokenizer, stop, callbacks)
            except Finished as finished:
                if self._info.rank == 0:
                    show(f"{finished}\n")
            mesh.barrier()
            self._cease_to_watch()
            rendezvous.end_process_group(self._info)
            self.ending.leave()
            return 0
        except MegapipeError as error:
            return self.ending.report(error)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if is_out_of_memory(error):
                oom_error = out_of_memory(error, self._config, self._layout, self._info.rank)
                return self.ending.report(oom_error)
            return self.ending.report_unexpected(error)
        finally:
            self._cease_to_watch()
            self.ending.cleanup()  # after the peers know of the end: an upload may take time

    @property
    def _info(self) -> LaunchInfo:
        """Position of this process in the job."""
        return self.ending.info

    def _begin_to_watch(self) -> None:
        """Find the processes on this host; start a monitor of this process if it has peers."""
        from megapipe.distributed.flight import flight_record

        info = self.ending.info = rendezvous.place_on_host(self._store, self._info, self._timeout)
        if info.world == 1:
            return
        run = self._command.config.run
        hub = info.address, info.port, "starting the monitor of the nodes"
        several = info.local_world < info.world
        self._watch = RankWatch(
            self._store,
            info.rank,
            self._timeout,
            Path(run.folder) / run.name / "hangs",
            listen=partial(listen_beside, *hub, heartbeat.print_notice) if several else None,
            flight_record=flight_record,
            end=self.ending.hangs,
        )
        self.ending.lost_contact = self._watch.lost_contact
        self._journal = self._watch.journal
        self._journal.set_activity(text("waiting for the other ranks"))

    def _take_layout(self) -> None:
        """Take the resolved layout. If the command leaves the layout to a search, rank 0 chooses it
        for all ranks; then resolve it."""
        resolved = self._resolved
        if resolved is None:

            def search() -> str:
                return json.dumps(search_layout(self._command, self._info.world))

            rank = self._info.rank
            self._journal.set_activity(text("searching the layout"))
            found = rendezvous.of_rank_0(self._store, rank, SEARCH_S, "the layout", search)
            self._command = with_values(self._command, json.loads(found))
            resolved = _resolve(self._command, self._info)
        self._config, self._layout = _, layout = resolved
        sizes = (layout.dp, layout.tp, layout.cp, layout.pipeline_processes, layout.ep_ranks)
        allow_connections(sum(size - 1 for size in sizes) + self._info.world * self._info.hosts)

    def _cease_to_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer, first on one process of the host; the others then find its files."""
        load = partial(load_tokenizer, self._config.data.tokenizer)
        rank, timeout = self._info.rank, self._timeout
        return rendezvous.first_on_host(self._store, rank, "tokenizer", load, timeout)

    def _agree(self, tokenizer: Tokenizer) -> tuple[torch.device, str]:
        """Compare configuration and versions with other ranks, and resolve the settings that depend
        on the device and the tokenizer. Returns the device and the backend of process groups."""
        import torch

        from megapipe.observe.out_of_memory import remember_allocations
        from megapipe.train.start_point import check_load

        command, info, store = self._command, self._info, self._store
        rendezvous.compare_ranks(store, info, compared(self._config, tokenizer), self._timeout)
        device, backend = devices.choose_device(self._config.parallel, info, store)
        kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
        self._config, self._layout = resolve(
            self._config,
            _world(command, info),
            tokenizer.vocab_size,
            where=command.where,
            device=kind,
            before=self._layout,
            measure=_agreed(partial(rendezvous.of_rank_0, store, info.rank, self._timeout)),
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            bind_near(devices.pci_address(device))
        # rank 0 checks for all ranks: if it fails, the others end even if they are further
        if info.rank == 0 and not (command.time_slices or progress.is_restart(os.environ)):
            self._journal.set_activity(text("reading checkpoint.load"))
            check_load(self._config)
        if self._config.log.memory_history:
            remember_allocations(device)
        return device, backend

    def _join(self, device: torch.device, backend: str) -> ParallelMesh:
        """Make the process group of all ranks, and the groups of the layout."""
        from megapipe.distributed.mesh import Grid, ParallelMesh

        info, layout = self._info, self._layout
        timeout = self._timeout + WATCHED_S * self._watched
        rendezvous_counter = self._journal.counter("meeting", range(info.world))
        enter = partial(rendezvous.start_process_group, self._store, info, backend, timeout)
        rendezvous_counter.wait(rendezvous_counter.count(), enter)
        grid = Grid(
            layout.pipeline_processes,
            layout.dp,
            layout.cp,
            layout.tp,
            *layout.ep_sizes,
            layout.ranks_per_node,
        )
        with rendezvous.connecting(info):
            return ParallelMesh(grid, device=device, timeout_s=timeout, journal=self._journal)

    def _time_slices(self, mesh: ParallelMesh) -> None:
        from megapipe.train import slice_times

        found = slice_times.report(self._config, self._layout, mesh)
        if self._info.rank == 0:
            show(found)

    def _train(
        self,
        mesh: ParallelMesh,
        tokenizer: Tokenizer,
        stop: StopRequest,
        callbacks: Sequence[Callback],
    ) -> None:
        info = self._info
        trainer = self._trainer(
            self._config,
            self._layout,
            mesh,
            tokenizer,
            local_rank=info.local_rank,
            stop=stop,
            callbacks=callbacks,
        )
        self.ending.cleanup = trainer.close
        if not self._watched:
            self._cease_to_watch()
        elif not info.joined:  # the caller's groups keep their time-outs
            mesh.leave_hangs_to_monitors()
        try:
            trainer.run()
        except Preempted as stopped:
            hint = _resume_hint(trainer.folder.path, trainer.reached, info)
            raise Preempted(f"{stopped}{hint}") from None


def _agreed(of_rank_0: Callable[[str, Callable[[], str]], str]) -> Measurements:
    """Return measurements that rank 0 makes for all ranks."""

    def freed(config: Config, layout: Layout) -> Fraction:
        def measure() -> str:
            return str(freed_by_input_grad(config, layout, units_of_run(config, layout)))

        return Fraction(of_rank_0("the measurement of saved activations", measure))

    def experts(config: Config, layout: Layout) -> ExpertForm:
        def measure() -> str:
            return json.dumps(chosen_form(config, layout, units_of_run(config, layout)))

        return ExpertForm(*json.loads(of_rank_0("the choice of expert dispatch", measure)))

    return Measurements(freed, experts)


def _resume_hint(folder: Path, reached: int, info: LaunchInfo) -> str:
    """Return the command that continues a run after step `reached`, as the end of a sentence. With
    several nodes the command omits the launcher, which only the user knows."""
    from megapipe.observe.summary import next_commands, resume_arguments  # loads torch

    with contextlib.suppress(MegapipeError, OSError):
        path = newest_config(folder)
        if path is not None and info.local_world < info.world:
            arguments = resume_arguments(path, reached)
            return f"; to go on, start on each node as before: {shlex.join(arguments)}"
        if path is not None:
            return f"; to continue: {next_commands(folder, reached, info.options)['to continue']}"
    return ""


def compared(config: Config, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the values that must be equal on all ranks: all settings of the resolved
    configuration, the tokenizer's size, and the versions of the code."""
    import torch

    return {
        **flatten(config),
        "the tokenizer's size": tokenizer.vocab_size,
        "megapipe's files": package_hash(),
        "torch": torch.__version__,
    }
