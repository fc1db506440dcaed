"""A CSV log of one rank, as text: two steps of an epoch and its validation."""

HEAD = "Epoch,itr,BT(s),DT(s),avg:BT(s),Loss,avg:Prec@1,val,wire_bytes,wait(s),elapsed(s)"
ROWS = ["0,0,2,1,2,3,50,-1,100,0.5,2", "0,1,2,1,2,2,60,-1,300,0.5,4", "0,-1,2,1,2,2,60,55,0,0,4"]


def csv_log(*rows: str, head: str = HEAD, start: str = "BEGIN-TRAINING", batch: str = "Batch-Size,8") -> str:
    return "\n".join([start, "World-Size,1", "Num-DLWorkers,0", batch, head, *rows, ""])
