// A stock Playwright client for Node: node browser_client.js PLAYWRIGHT-CORE ADDRESS SITE. Prints what it saw as JSON.
'use strict';
const fs = require('node:fs');
const { chromium } = require(process.argv[2]);
const [address, site] = process.argv.slice(3);

(async () => {
  const browser = await chromium.connect(address);
  const seen = { version: browser.version() };
  const page = await browser.newPage();
  await page.goto(site + '/');
  await page.click('button');
  seen.button = await page.textContent('button');
  await Promise.all([page.waitForURL('**/next'), page.click('text=next')]);
  seen.title = await page.title();
  seen.screenshot = (await page.screenshot()).subarray(1, 4).toString();
  await page.goto(site + '/');
  const [download] = await Promise.all([page.waitForEvent('download'), page.click('text=file')]);
  seen.download = [download.suggestedFilename(), fs.readFileSync(await (async () => { await download.saveAs('./saved'); return './saved'; })(), 'utf8')];
  const contexts = [await browser.newContext(), await browser.newContext()];
  for (const [n, context] of contexts.entries()) {
    const other = await context.newPage();
    await other.goto(site + '/');
    await other.evaluate((n) => { document.cookie = 'n=' + n; }, n);
  }
  seen.cookies = await Promise.all(contexts.map(async (context) => (await context.cookies()).map((cookie) => cookie.value)));
  await browser.close();
  console.log(JSON.stringify(seen));
})().catch((error) => { console.error(error.message); process.exit(1); });
