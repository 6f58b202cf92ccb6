"""The benchmarks, by the names that the command line knows, in the order of the page."""

from __future__ import annotations

from types import MappingProxyType, ModuleType

from benchmarks import (
    accounting,
    adaptive_clipping,
    adversary,
    agent_memory,
    aggregation,
    counting,
    demo_digits,
    demo_mnist,
    demo_scattering,
    enrolment,
    frameworks,
    governor,
    installed_size,
    noise_cap,
    pld,
    poisoning,
    precision,
    precision_mnist,
    processes,
    published_attack,
    reports,
    reproduce_m1,
    reproduce_m1_cifar,
    reproduce_m1_many_rounds,
    reproduce_m1_mnist,
    reproduce_m2,
    reproduce_m3,
    reproduce_m4,
    reproduce_m4_images,
    reproduce_m5,
    sampler,
    seal,
    simulation,
    step_shares,
    swarm_rounds,
    tokens,
    traffic,
    workers,
)

#: Every benchmark: a module whose docstring gives the subject, the method and the limits, and whose
#: ``run()`` gives its figures. Where that is short of what a paper did, ``run_long()`` may come nearer.
BENCHMARKS: MappingProxyType[str, ModuleType] = MappingProxyType(
    {
        module.__name__.rpartition(".")[2]: module
        for module in (
            demo_digits,
            demo_mnist,
            demo_scattering,
            noise_cap,
            aggregation,
            poisoning,
            precision,
            precision_mnist,
            sampler,
            accounting,
            pld,
            published_attack,
            reports,
            swarm_rounds,
            workers,
            enrolment,
            reproduce_m1,
            reproduce_m1_mnist,
            reproduce_m1_many_rounds,
            reproduce_m1_cifar,
            reproduce_m2,
            reproduce_m3,
            reproduce_m4,
            reproduce_m4_images,
            adaptive_clipping,
            reproduce_m5,
            frameworks,
            processes,
            simulation,
            governor,
            step_shares,
            agent_memory,
            installed_size,
            seal,
            traffic,
            tokens,
            counting,
            adversary,
        )
    }
)
