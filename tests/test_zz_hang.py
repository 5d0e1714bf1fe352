import signal, time, dibs, subprocess, sys, os
from tests.test_api import WAITER
from tests.servers import PostgresServer
def test_it(postgres_url):
    w="import faulthandler,signal; faulthandler.register(signal.SIGUSR1, all_threads=True)\n"+WAITER
    for n in range(120):
        p=subprocess.Popen([sys.executable,"-c",w,postgres_url,"busy"],stdout=subprocess.PIPE,stderr=subprocess.PIPE,text=True)
        p.stdout.readline(); time.sleep(0.003*(n%12)); p.send_signal(2)
        try: p.communicate(timeout=4)
        except subprocess.TimeoutExpired:
            p.send_signal(signal.SIGUSR1); time.sleep(.5); p.kill(); out,err=p.communicate(); print("HANG",n,err); assert 0
