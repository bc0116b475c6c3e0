"""The benchmark behind `medusa bench`: one run taken apart (`run`, `profile`), or drafters x texts x batches
(`grid`), with the library's own ways beside ours (`contenders`).
"""
