"""The engine of vLLM for cells and Poisson, by vllm_longctx.py, which lies on PYTHONPATH: one start for all of them.

usage: vllm_child.py BATCHxCONTEXT.. [poisson=RATE]"""
import asyncio
import random
import sys

import vllm_longctx as v


async def main(words):
    engine = await v.engine(False, 0)

    async def same(*_):
        return engine

    v.engine = same  # poisson() starts its own else
    random_ids = random.Random(1)
    await v.cell(engine, random_ids, 2, 2048, 32)  # as grid() warms up
    for word in words:
        if word.startswith("poisson="):
            await v.poisson(float(word.split("=")[1]))
            return  # it has ended the engine
        try:
            await v.cell(engine, random_ids, *(int(x) for x in word.split("x")))
        except Exception as e:  # the other cells may still go
            v.say(what="cell", cell=word, error=repr(e)[:200])
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
