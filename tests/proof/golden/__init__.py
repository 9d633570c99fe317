"""Golden files: IRs with the commands to run on them, and what these print.

    ; RUN: fxsplit opt %s -p augment --diff
    ; CHECK: $ fxsplit opt %s -p augment --diff
    ; CHECK-NEXT: ...
    fxsplit-ir 1
    ...

`%s` is the file. `not` before a command says that it fails, and then its exit code is printed. The CHECK lines are
those of the package filecheck, the Python version of LLVM's FileCheck. `make golden` writes them anew; read the
difference before you commit it.
"""
