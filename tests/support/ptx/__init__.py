"""An executor of PTX, NVIDIA's virtual instruction set, on numpy: kernels run on any machine, and faults are noticed.

`parser` reads a kernel and names the faults; `values` computes what a thread computes alone; `memory` holds bytes and
who touched them last, asynchronous copies and products; `warps` and `wgmma` hold what the threads of a warp and of a
warp group do together; `execution` is the machine, `grid` runs a launch; `images` compiles the project's kernels, and
`launches` runs them.
"""
