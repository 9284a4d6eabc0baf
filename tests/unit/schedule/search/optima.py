"""Problems whose optimum is proved."""

from fractions import Fraction

from megapipe.schedule.cost import Cost

OPTIMA_TEXT = """
v 2 3 makespan; 10 6 4 8; 4 5 4 5; 10 7 7 9; 0; 2 1; 0; 148
single 3 6 span; 11 8 8; 5 8 8; 8 7 6; 0; 5/2 5/2 5/2; 0; 200
loop 2 3 makespan; 3 4 5 3; 3 4 4 11; 10 8 10 9; 3; 2 2; 1/3; 130
single 4 5 makespan; 11 8 10 14; 6 6 7 10; 6 5 4 10; 1; 3 3/2 9/2 3; 0; 340
loop 3 6 span; 10 7 9 6 7 11; 8 8 6 8 6 13; 9 3 4 6 4 4; 1; 2 2 2; 1/3; 364
single 3 3 span; 8 4 12; 4 4 4; 7 4 8; 0; 2 2 2; 0; 86
v 2 3 makespan; 11 10 10 14; 5 5 5 6; 5 4 4 7; 1; 5/2 2; 1/3; 144
loop 3 5 makespan; 9 9 9 9 9 8; 18 18 18 18 18 20; 9 4 4 6 6 10; 1; 3/2 3/2 3/2; 0; 568
single 3 4 span; 11 8 13; 2 5 9; 7 8 6; 1; 3 3 3; 1/3; 125
v 3 3 span; 8 6 6 6 6 13; 3 6 5 5 5 8; 7 7 5 7 7 11; 1; 2 2 4; 1/3; 162
loop 3 6 makespan; 11 7 6 8 9 9; 9 8 8 8 8 6; 10 8 8 8 8 15; 3; 2 2 2; 0; 408
loop 3 3 span; 8 3 5 4 7 7; 7 7 7 7 5 12; 7 5 4 6 5 8; 3; 4 2 3; 0; 179
single 3 8 makespan; 14 8 12; 6 7 6; 8 3 9; 0; 5/2 5/2 5/2; 1/3; 282
v 4 5 span; 10 6 8 7 7 9 7 13; 6 8 6 8 8 8 8 13; 3 2 4 4 5 6 6 7; 0; 5 5 5 5; 0; 264
loop 4 5 span; 6 4 4 4 4 4 5 4; 5 5 5 5 5 5 5 5; 9 9 8 8 10 9 9 12; 3; 3 5/2 9/2 1; 0; 338
single 2 8 makespan; 8 9; 6 8; 9 9; 1; 3 5/2; 1/3; 217
single 2 7 span; 8 7; 8 13; 8 9; 3; 3/2 2; 1/3; 350
v 2 4 span; 11 10 11 13; 18 20 22 24; 11 10 9 11; 1; 3 1; 0; 507
loop 4 8 makespan; 8 8 6 8 9 8 9 10; 4 4 3 4 4 4 6 7; 11 7 11 9 11 7 11 9; 3; 1 3/2 2 4; 1/3; 1051
v 2 4 makespan; 9 7 9 9; 8 6 8 13; 6 5 7 8; 3; 1 2; 0; 270
v 3 3 makespan; 7 6 7 7 8 9; 5 4 5 5 5 5; 7 4 4 4 2 6; 3; 3 3 3; 1/3; 143
single 4 5 makespan; 8 8 7 10; 8 8 8 9; 12 9 9 14; 0; 3/2 4 5 1; 0; 390
loop 4 6 span; 10 8 8 9 8 8 8 13; 9 9 9 9 9 9 9 11; 7 5 5 5 5 6 5 3; 3; 1 1 1 1; 1/3; 935
v 2 3 span; 6 6 5 11; 5 6 7 12; 7 7 5 8; 3; 5/2 5/2; 1/3; 152
"""


def _optimum(line: str):
    first, *rows = (part.split() for part in line.split(";"))
    name, ranks, microbatches, objective = first
    *times, (latency,), limits, (freed,), (optimum,) = [tuple(map(Fraction, row)) for row in rows]
    times = [tuple(map(int, row)) for row in times]
    cost = Cost(*times, latency=int(latency))
    return name, int(ranks), int(microbatches), cost, limits, freed, objective, int(optimum)


OPTIMA = [_optimum(line) for line in OPTIMA_TEXT.split("\n")[1:-1]]


def accounting(freed: Fraction) -> dict:
    return {"accounting": "weighted" if freed else "held", "freed": freed}
