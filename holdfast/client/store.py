import json, os, sys, signal
from pathlib import Path
from holdfast.wire import unixpath
signal.signal(signal.SIGINT, signal.SIG_IGN)
import torch.distributed as dist
from datetime import timedelta
run_dir=Path(sys.argv[1])
l=unixpath.listen(run_dir/"store.sock")
stores={}
while True:
    c,_=l.accept()
    f=c.makefile("rwb")
    for line in f:
        q=json.loads(line)
        if "open" in q:
            g=q["open"]
            if g not in stores: stores[g]=dist.TCPStore("127.0.0.1",0,is_master=True,wait_for_workers=False)
            f.write(json.dumps({"port":stores[g].port}).encode()+b"\n")
        elif "quit" in q:
            f.write(b"{}\n"); f.flush(); (run_dir/"store.sock").unlink(); os._exit(0)
        f.flush()
