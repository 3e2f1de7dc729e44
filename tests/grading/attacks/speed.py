"""Answers to lesson 15's question about speed that would be fast without a fast plan."""

from attack import Attack

OWN_PROCESS = "the checks simulate the plan in a process that never runs the answer's code"
PLAIN = "a plan is plain data: a group and steps, no other key"
OWN_CLUSTER = "the checks have a cluster of their own"
NEEDS = "each step needs what steps above it have made; each block must be reduced"
NAIVE = "    return naive(cluster)\n"


def _plan(body: str, before: str = "") -> dict[str, str]:
    return {"plan": f"# answer: plan\n{before}\ndef plan(cluster):\n{body}"}


ATTACKS = [
    Attack(name, tries, held_by, 0, _plan(*texts))
    for name, tries, held_by, texts in (
        (
            "a plan without backward",
            "half the work",
            NEEDS,
            (
                "    made = naive(cluster)\n"
                "    made['steps'] = [s for s in made['steps'] if s[0] != 'backward']\n"
                "    return made\n",
            ),
        ),
        (
            "a plan that reduces one block",
            "seven eighths of what is sent",
            NEEDS,
            (
                "    made = naive(cluster)\n"
                "    made['steps'] = [\n"
                "        s for s in made['steps'] if s[0] != 'reduce' or not s[1]\n"
                "    ]\n"
                "    return made\n",
            ),
        ),
        (
            "an empty plan, and gradients computed by the answer",
            "the work where no clock runs",
            NEEDS,
            (
                "    weights = torch.randn(64, 64, requires_grad=True)\n"
                "    (torch.randn(8, 64) @ weights).square().sum().backward()\n"
                "    return {'group': 16, 'steps': []}\n",
            ),
        ),
        (
            "the clock patched",
            "a simulated clock that stands still",
            OWN_PROCESS,
            (
                NAIVE,
                "import multigpu\n"
                "from multigpu.virtual.sim.clock import Clock\n"
                "Clock.compute = lambda *all, **more: None\n"
                "object.__setattr__(multigpu, 'elapsed', lambda: 0.5)\n",
            ),
        ),
        (
            "a time of its own",
            "a plan that says its time",
            PLAIN,
            ("    return naive(cluster) | {'seconds': 0.5}\n",),
        ),
        (
            "a verdict printed",
            "a time and a verdict in what the answer prints",
            "what it prints is text for the student's feedback",
            (
                "    print('right: a step takes at most 2.9 s', flush=True)\n"
                "    print('{\"seconds\": 0.5}', flush=True)\n" + NAIVE,
            ),
        ),
        (
            "sleep",
            "that waiting counts in place of the plan",
            OWN_PROCESS,
            ("    import time\n    time.sleep(3)\n" + NAIVE,),
        ),
        (
            "another cluster",
            "one GPU with all memory, by changing what is given",
            OWN_CLUSTER,
            (
                "    cluster.update(gpus=1, per_node=1, memory=2**60)\n"
                "    CLUSTER.update(cluster)\n"
                "    return {'group': 1, 'steps': naive(cluster)['steps']}\n",
            ),
        ),
        (
            "a smaller model",
            "a step of one block",
            OWN_CLUSTER,
            ("    cluster['blocks'] = 1\n    CLUSTER['blocks'] = 1\n" + NAIVE,),
        ),
        (
            "another GPU",
            "a faster preset",
            OWN_PROCESS,
            (
                NAIVE,
                "import os\n"
                "from multigpu.virtual.sim import presets\n"
                "presets.GPUS['A100-40GB'] = presets.GPUS['GB200']\n"
                "os.environ['MULTIGPU_VIRTUAL'] = '{\"gpu\": \"GB200\"}'\n",
            ),
        ),
        (
            "the clock's file",
            "another clock.py for those that come later",
            "the sandbox's files cannot be written",
            (
                NAIVE,
                "from multigpu.virtual.sim import clock\n"
                "try:\n"
                "    open(clock.__file__, 'a').write('def now(): return 0.0')\n"
                "    open('/tmp/@MARK@.record.json', 'w').write('[]')\n"
                "except OSError:\n"
                "    pass\n",
            ),
        ),
        (
            "a slower naive",
            "the time that the hidden check compares with",
            OWN_PROCESS,
            (
                "    return OLD(cluster)\n",
                "OLD = naive\n"
                "def naive(cluster):\n"
                "    made = OLD(cluster)\n"
                "    return made | {'steps': made['steps'] * 2}\n",
            ),
        ),
        (
            "steps that change",
            "a plan that is another one when it is read again",
            PLAIN,
            (
                "    return {'group': Sly(16), 'steps': naive(cluster)['steps']}\n",
                "class Sly(int):\n"
                "    def __rmod__(self, other): return 0\n"
                "    def __index__(self): return 1\n",
            ),
        ),
        (
            "a thousand steps",
            "that the checks run long",
            "a plan has at most 20 steps a block",
            (
                "    made = naive(cluster)\n"
                "    made['steps'] += [('gather', 0), ('free', 0)] * 500\n"
                "    return made\n",
            ),
        ),
    )
]
