"""From a command to a finished run: everything one process does, and how it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe import heartbeat, retries
from megapipe.cli import Command, flatten, show
from megapipe.command_line import check_temporary_folder, load_torch, phase
from megapipe.config import Config
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.environment import set_environment
from megapipe.errors import MegapipeError, Preempted
from megapipe.launch import devices, progress, rendezvous
from megapipe.launch.affinity import bind_near
from megapipe.launch.launcher import nodes_of
from megapipe.launch.listening import listen_beside
from megapipe.launch.open_files import allow_connections
from megapipe.launch.place import LaunchInfo
from megapipe.launch.shutdown import Shutdown
from megapipe.launch.signals import StopRequest
from megapipe.layout.cuts import check_timeable
from megapipe.layout.devices import device_kind
from megapipe.layout.dispatch import on_nodes
from megapipe.layout.expert_checks import check_imbalance
from megapipe.layout.expert_copies import check_pool
from megapipe.layout.fallbacks import check_fewest, check_layouts
from megapipe.layout.layout import DeviceKind, Layout
from megapipe.layout.resolve import resolve
from megapipe.observe.observer import check_sinks
from megapipe.observe.provenance import newest_config, package_hash
from megapipe.plan.freed import freed_share
from megapipe.plan.report import report as plan_report
from megapipe.plan.units import units_of_run
from megapipe.watch.journal import Journal, text
from megapipe.watch.rank import WATCHED_S, Watch

if TYPE_CHECKING:
    from megapipe.train.callbacks.callback import Callback


def start(
    command: Command,
    info: LaunchInfo,
    stop: StopRequest,
    shutdown: type[Shutdown] = Shutdown,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Print the plan, time slices, or train. Returns the process' exit code.

    Raises :class:`MegapipeError` for what is wrong before the processes meet; from then on errors
    are reported here by `shutdown`, once per job.
    """
    if info.local_rank > 0:
        retries.be_quiet()
    stop.speaks = info.rank == 0
    stop.launcher = os.getppid() if info.hosted else None
    if not command.dry_run:  # before code of the user's may load torch
        check_temporary_folder()
        given = command.config
        alone = given.parallel.pp == 1 or given.pipeline.channels == "in_process"
        set_environment(
            os.environ,
            sends_messages=not alone and device_kind(given) == "cuda",
            deterministic=given.run.deterministic,
        )
    world = None if command.dry_run and not info.launched else info.world
    given = on_nodes(command.config, info.local_world) if info.launched else command.config
    freed = None if info.launched and not command.dry_run else freed_share
    config, layout = resolve(given, world, None, where=command.where, freed=freed)
    check_layouts(given, layout.world, where=command.where, freed=freed_share)
    if info.options is not None:
        nodes, ranks = nodes_of(info.options), info.local_world
        check_fewest(given, nodes, ranks, where=command.where, freed=freed_share)
    check_sinks(config.log)
    check_pool(config, layout)
    check_imbalance(config, command.imbalance)
    name = config.data.tokenizer
    if command.dry_run:
        if info.rank == 0:
            if config.model.vocab_size is None:
                vocabulary = load_tokenizer(name).vocab_size
                config, layout = resolve(
                    config,
                    world,
                    vocabulary,
                    where=command.where,
                    before=layout,
                    freed=freed_share,
                )
            with phase("working out the plan"):
                plan = plan_report(config, layout, command.imbalance)
            show(plan)
        return 0
    if command.time_slices:
        check_timeable(config, layout.schedule.slices)
    # torch is loaded after the configuration is known to be right, unless code of the user's has
    if info.rank == 0:
        load_torch()
    import torch

    from megapipe.distributed.flight import flight_record
    from megapipe.distributed.mesh import Grid, ParallelMesh
    from megapipe.observe.out_of_memory import is_out_of_memory, out_of_memory, remember_allocations
    from megapipe.train import slice_times
    from megapipe.train.source import Finished, check_load
    from megapipe.train.trainer import Trainer

    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    timeout = config.parallel.timeout_s
    sizes = (layout.dp, layout.tp, layout.cp, layout.pipeline_processes, layout.expert_ranks)
    allow_connections(sum(size - 1 for size in sizes) + info.world * info.hosts)
    with stop.steady if info.hosts else nullcontext():  # one thread alone can open the store
        store = rendezvous.open_store(info, timeout)
        watched = info.world > 1 and config.parallel.watchdog
        ending = shutdown(
            info, store, timeout_s=timeout + WATCHED_S * watched, trace=command.traceback
        )
        stop.leave, stop.interrupt = ending.stop, ending.interrupt
    watch, journal = None, Journal()
    try:
        info = ending.info = rendezvous.place_on_host(store, info, timeout)
        several = info.local_world < info.world
        if info.world > 1:
            hub = info.address, info.port, "the process that watches the nodes"
            watch = Watch(
                store,
                info.rank,
                timeout,
                Path(config.run.folder) / config.run.name / "hangs",
                listen=partial(listen_beside, *hub, heartbeat.say) if several else None,
                flight_record=flight_record,
                end=ending.hangs,
            )
            ending.lost_contact = watch.lost_contact
            journal = watch.journal
            journal.does(text("meeting the others"))
        tokenizer = rendezvous.first_on_host(
            store, info.rank, "tokenizer", lambda: load_tokenizer(name), timeout
        )
        config, layout = resolve(
            config, world, tokenizer.vocab_size, where=command.where, before=layout
        )
        rendezvous.compare_ranks(store, info, compared(config), timeout)
        of_rank_0 = partial(rendezvous.of_rank_0, store, info.rank, timeout)
        device, backend = devices.choose(config.parallel, info, store)
        kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
        config, layout = resolve(
            config,
            world,
            tokenizer.vocab_size,
            where=command.where,
            device=kind,
            before=layout,
            freed=partial(_agreed_freed, of_rank_0),
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            bind_near(devices.pci_address(device))
        # one rank for all: whoever else is a group further already ends with it
        if info.rank == 0 and not (command.time_slices or progress.is_again(os.environ)):
            journal.does(text("looking at checkpoint.load"))
            check_load(config)
        if config.log.memory_history:
            remember_allocations(device)
        timeout += WATCHED_S * watched
        meeting = journal.line("meeting", range(info.world))
        enter = partial(rendezvous.start_process_group, store, info, backend, timeout)
        meeting.wait(meeting.count(), enter)
        grid = Grid(
            layout.pipeline_processes,
            layout.dp,
            layout.cp,
            layout.tp,
            *layout.of_experts,
            layout.node,
        )
        with rendezvous.connecting(info):
            mesh = ParallelMesh(grid, device=device, timeout_s=timeout, journal=journal)
        try:
            if command.time_slices:
                found = slice_times.report(config, layout, mesh)
                if info.rank == 0:
                    show(found)
            else:
                trainer = Trainer(
                    config,
                    layout,
                    mesh,
                    tokenizer,
                    local_rank=info.local_rank,
                    stop=stop,
                    callbacks=callbacks,
                )
                ending.cleanup = trainer.close
                if watch is not None and not watched:
                    watch.close()
                elif watched and not info.joined:  # the caller's groups keep their time-outs
                    mesh.leave_hangs_to_monitors()
                try:
                    trainer.run()
                except Preempted as stopped:
                    hint = _resume_hint(trainer.folder.path, trainer.reached, info)
                    raise Preempted(f"{stopped}{hint}") from None
        except Finished as finished:
            if info.rank == 0:
                show(f"{finished}\n")
        mesh.barrier()
        if watch is not None:
            watch.close()
        rendezvous.end_process_group(info)
        ending.leave()
        return 0
    except MegapipeError as error:
        return ending.report(error)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if is_out_of_memory(error):
            return ending.report(out_of_memory(error, config, layout, info.rank))
        return ending.report_unexpected(error)
    finally:
        if watch is not None:
            watch.close()
        ending.cleanup()  # after the peers know: an upload may take its time


def _agreed_freed(
    of_rank_0: Callable[[str, Callable[[], str]], str], config: Config, layout: Layout
) -> Fraction:
    """Have rank 0 measure the share."""

    def measure() -> str:
        return str(freed_share(config, layout, units_of_run(config, layout)))

    return Fraction(of_rank_0("the run of stages without values", measure))


def _resume_hint(folder: Path, reached: int, info: LaunchInfo) -> str:
    """Return the command by which a run goes on after step `reached`, as the end of a sentence. On
    several nodes the launcher is left out: only the user knows it."""
    from megapipe.observe.summary import next_commands, training_again  # loads torch

    with contextlib.suppress(MegapipeError, OSError):
        path = newest_config(folder)
        if path is not None and info.local_world < info.world:
            again = training_again(path, reached)
            return f"; to go on, start on each node as before: {shlex.join(again)}"
        if path is not None:
            return f"; to go on: {next_commands(folder, reached, info.options)['to go on']}"
    return ""


def compared(config: Config) -> dict[str, object]:
    """The values that all ranks have to have alike: all keys of a resolved configuration, the
    code."""
    import torch

    return {**flatten(config), "megapipe's files": package_hash(), "torch": torch.__version__}
